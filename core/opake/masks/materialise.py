"""The mask function behind `AttentionMaskInterface`: whether a mask is skipped depends on its presence alone.

Transformers drops a mask that turns out to be all ones, after looking at its values: that reads the whole batch, so one
padded neighbour switches the kernel of every row, and it cannot run under vmap. Here a supplied mask is always
materialised, and the fused causal path is taken when none is supplied, with a window where the model hands it on.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import sdpa_mask

from opake.attention.names import hands_on_windows
from opake.attention.windows import is_causal_window, unmasked


def mask_function(
    *args: Any,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    local_size: int | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Boolean mask (B, 1, T, S), True where a query sees a key, or None for plain causal attention without padding.

    Arguments as Transformers' `sdpa_mask`. or- and and-mask functions arrive inside `mask_function` and are composed
    there as ever.
    """
    absent = attention_mask is None
    if absent and allow_is_causal_skip and local_size is not None and hands_on_windows(kwargs.get("config")):
        local_size = needed(local_size, **kwargs)
    if absent and left_out_of_graph(allow_is_causal_skip, allow_is_bidirectional_skip, local_size, **kwargs):
        return None
    return sdpa_mask(
        *args,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip and absent,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip and absent,
        local_size=local_size,
        **kwargs,
    )


def left_out_of_graph(causal: bool, bidirectional: bool, local_size: int | None, **kwargs: Any) -> bool:
    """Whether no mask is needed in a CUDA graph under capture, where nobody supplied one.

    Older Transformers takes a capture for an export and makes a mask of causality itself, which costs the attention
    kernel more than half of its speed. Whether it is needed does not depend on any value.
    """
    T, S = kwargs.get("q_length", 0), kwargs.get("kv_length", 1)
    if not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
        return False
    return (local_size is None or local_size > S) and (bidirectional or (causal and T in (1, S)))


def needed(local_size: int, **kwargs: Any) -> int | None:
    """The window that a mask has to be made for; None where the attention function applies it.

    kwargs: what a mask function is called with.
    """
    T, S = kwargs.get("q_length", 0), kwargs.get("kv_length", 1)
    if unmasked(kwargs.get("device", "cpu"), T, S) and is_causal_window(kwargs.get("mask_function"), local_size):
        return None
    return local_size
