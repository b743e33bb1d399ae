"""The public attention op: checks, then a fused backend where one is exact, else the plain twin."""

from __future__ import annotations

from typing import Any

import torch

from opake_kernels.checks import (
    autocast_to_compute_dtype,
    check_float,
    check_same_device,
    check_same_dtype,
    check_shape,
)

from .backends import choose
from .cuda import flash_window
from .folded import folded_attention
from .math import allowed, attention_reference
from .route import FLASH_WINDOW, MATH, TRITON, Asked, route
from .tiled import tiled_attention


def opake_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Scaled dot-product attention (Vaswani et al., 2017), one call a microbatch under any nesting of vmap and grad.

    q: (B, N, T, D); k: (B, K, S, D); v: (B, K, S, Dv), K dividing N (grouped queries); one floating dtype and device
    mask: bool (True = sees the key) or additive, broadcastable to (B, N, T, S); a fully masked query row gives zeros
    causal: a query sees no later key; the last query is aligned with the last key
    scale: factor of the scores, D ** -0.5 if None
    window: a query sees the last `window` keys up to itself; needs `causal`
    softcap: scores become softcap * tanh(scores / softcap) before masking (Gemma 2)
    sinks: (N,) extra logits that take part in the softmax and are then dropped (GPT-OSS)
    dropout: probability of dropping an attention weight

    Returns (B, N, T, Dv) in q's dtype. Raises ValueError or TypeError on shapes, dtypes or devices that do not go
    together, before anything is computed.
    """
    q, k, v = autocast_to_compute_dtype(q, k, v)
    _check(q, k, v, mask, causal, window, sinks)
    return attend(q, k, v, mask, causal, scale, window, softcap, sinks, dropout)[0]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    dropout: float,
) -> tuple[torch.Tensor, str | None]:
    """`opake_attention` without its checks, and why it took the plain twin (None: it did not)."""
    if window is not None and window >= k.shape[-2]:
        window = None
    asked = Asked(mask, causal, window, softcap, sinks, dropout)
    taken, reason = route(q, k, v, asked)
    options: dict[str, Any] = {"causal": causal, "scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    if taken == MATH:
        return attention_reference(q, k, v, mask=mask, dropout=dropout, **options), reason
    if taken == TRITON:
        return tiled_attention(q, k, v, mask=mask, **options), None
    if taken == FLASH_WINDOW:
        assert window is not None
        return folded_attention(flash_window(window), q, k, v, None, True, scale), None
    # fused kernels align `causal` with the first key, not the last
    if window is not None or (causal and (mask is not None or q.shape[-2] != k.shape[-2])):
        seen = allowed(q.shape[-2], k.shape[-2], None, causal, window, q.device)
        mask, causal = joined(mask, seen), False
    return folded_attention(choose(q, k, v, mask, causal), q, k, v, mask, causal, scale), None


def joined(mask: torch.Tensor | None, seen: torch.Tensor | None) -> torch.Tensor | None:
    """A mask (bool or additive) that also forbids what the boolean mask `seen` forbids."""
    if mask is None or seen is None:
        return seen if mask is None else mask
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    window: int | None,
    sinks: torch.Tensor | None,
) -> None:
    op = "opake_attention"
    check_float(op, q=q, k=k, v=v)
    check_same_dtype(op, q=q, k=k, v=v)
    check_same_device(op, q=q, k=k, v=v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{op}: {name} must have four dimensions (B, heads, tokens, D), got {tuple(tensor.shape)}")
    B, N, _, D = q.shape
    check_shape(op, "k", k.shape, (B, k.shape[1], k.shape[2], D), "batch and head size of q")
    check_shape(op, "v", v.shape, (B, k.shape[1], k.shape[2], v.shape[3]), "batch, heads and tokens of k")
    if N % k.shape[1]:
        raise ValueError(f"{op}: query heads ({N}) must be a multiple of key-value heads ({k.shape[1]})")
    if sinks is not None:
        check_shape(op, "sinks", sinks.shape, (N,), "one for each query head")
    if window is not None and (not causal or window < 1):
        raise ValueError(f"{op}: window={window} needs causal=True and at least one key, got causal={causal}")
    if mask is not None:
        check_same_device(op, q=q, mask=mask)
        _check_mask(op, mask, (B, N, q.shape[2], k.shape[2]))


def _check_mask(op: str, mask: torch.Tensor, full: tuple[int, ...]) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{op}: mask must be bool or floating point, got {mask.dtype}")
    tail = full[4 - mask.dim() :] if mask.dim() <= 4 else ()
    fits = len(tail) == mask.dim() and all(m in (1, f) for m, f in zip(mask.shape, tail, strict=True))
    if not fits:
        raise ValueError(f"{op}: mask of shape {tuple(mask.shape)} does not broadcast to (B, N, T, S) = {full}")
