"""The attention function behind `AttentionInterface`: stock SDPA outside steps, folded attention inside.

Outside steps a patched model computes what it computed before, bit for bit. What no fused kernel serves exactly
takes the mathematical path, and the module notes why.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from opake.checkpoint.step import in_batched_step
from opake.patching.notes import note
from opake.transforms import inside_transform
from opake_kernels.attention.math import allowed
from opake_kernels.attention.op import attend, joined
from opake_kernels.checks import autocast_to_compute_dtype

from .names import hands_on_windows


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query (B, N, T, D), key and value (B, K, S, D) -> (B, T, N, D), and no attention weights.

    softcap: Gemma 2's cap on the scores. s_aux: GPT-OSS's sinks. position_bias: T5's learned additive bias.
    sliding_window: applied where no mask was made for it.
    """
    window = _window(module, query, key, attention_mask, sliding_window)
    ordinary = softcap is None and s_aux is None and window is None
    if not inside_transform() and ordinary and not _masked_step(query, attention_mask, position_bias):
        bias = {} if position_bias is None else {"position_bias": position_bias}
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal=is_causal, **bias, **kwargs
        )
    query, key, value = autocast_to_compute_dtype(query, key, value)
    wanted = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(wanted) and query.shape[2] > 1 and attention_mask is None
    mask = _with_bias(attention_mask, position_bias)
    if causal and mask is not None:
        mask, causal = joined(mask, allowed(query.shape[2], key.shape[2], None, True, None, query.device)), False
    out, reason = attend(query, key, value, mask, causal, scaling, window, softcap, s_aux, dropout)
    if reason is not None:
        note(module, f"attention by plain operations: {reason}")
    return out.transpose(1, 2).contiguous(), None


def _masked_step(q: Any, mask: torch.Tensor | None, bias: torch.Tensor | None) -> bool:
    """Whether this is a step of the batched engine with a mask on CUDA, which takes the kernels of the other engine.

    Both engines then compute the same, and what PyTorch chooses for a mask by itself does not matter.
    """
    return q.is_cuda and mask is not None and bias is None and in_batched_step()


def _window(module: nn.Module, q: Any, k: Any, mask: Any, sliding_window: int | None) -> int | None:
    """The window that no mask was made for, None if every key lies within it."""
    if mask is not None or sliding_window is None or not hands_on_windows(getattr(module, "config", None)):
        return None
    return sliding_window if q.shape[2] == k.shape[2] > sliding_window else None


def _with_bias(mask: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor | None:
    if mask is None or bias is None:
        return bias if mask is None else mask
    return bias.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else bias + mask
