"""The mask function behind `AttentionMaskInterface`: whether a mask is skipped depends on its presence alone.

Transformers drops a mask that turns out to be all ones, after looking at its values: that reads the whole batch, so one
padded neighbour switches the kernel of every row, and it cannot run under vmap. Here a supplied mask is always
materialised, and the fused causal path is taken when none is supplied.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import sdpa_mask


def mask_function(
    *args: Any,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Boolean mask (B, 1, T, S), True where a query sees a key, or None for plain causal attention without padding.

    Arguments as Transformers' `sdpa_mask`. or- and and-mask functions arrive inside `mask_function` and are composed
    there as ever.
    """
    absent = attention_mask is None
    return sdpa_mask(
        *args,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip and absent,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip and absent,
        **kwargs,
    )
