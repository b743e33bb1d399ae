"""Which way a call of attention goes, from shapes, dtypes and options alone, and why not a fused one.

PyTorch's own kernels come first, where one is exact. Ours (`tiled`) serves what they have not: soft caps, sinks, value
heads of another size, windows and offset causality without a mask, shapes they refuse. Plain operations remain for
dropout, a mask that wants a gradient, float64, heads wider than 256, and wherever Triton cannot run. Ours is a flash
attention: `torch.nn.attention.sdpa_kernel` switches it with that backend.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from opake_kernels.launch import HAS_TRITON, uses_triton
from opake_kernels.tracked import trained

from .backends import PUBLIC, choose
from .cuda import window_serves

__all__ = ["FLASH_WINDOW", "FUSED", "MATH", "TRITON", "Asked", "route"]

MATH, TRITON, FLASH_WINDOW, FUSED = "math", "triton", "flash_window", "fused"
WIDEST = 256


class Asked(NamedTuple):
    """The options of a call; those of `opake_attention`."""

    mask: torch.Tensor | None = None
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    dropout: float = 0.0


def route(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, asked: Asked) -> tuple[str, str | None]:
    """(MATH | TRITON | FLASH_WINDOW | FUSED, why it is MATH): FUSED is what `backends.choose` chooses."""
    if asked.dropout:
        return MATH, "attention dropout: a fused backward cannot replay it under vmap"
    mask = asked.mask
    if mask is not None and mask.is_floating_point() and trained(mask):
        return MATH, "learned bias: fused backends give it no gradient"
    obstacle = _obstacle(q, k, v)
    if special := _special(q, v, asked):
        return (
            (TRITON, None) if obstacle is None else (MATH, f"{special}: only the Triton kernel has it, and {obstacle}")
        )
    offset = asked.causal and q.shape[-2] != k.shape[-2]
    if mask is None and (asked.window is not None or offset):
        if asked.window is not None and not offset and window_serves(q, k, v):
            return FLASH_WINDOW, None
        if obstacle is None and q.is_cuda:
            return TRITON, None
    masked = mask if mask is not None or not (asked.window or offset) else q
    refused = q.is_cuda and choose(q, k, v, masked, asked.causal and masked is None) is PUBLIC
    return (TRITON if refused and obstacle is None else FUSED), None


def _special(q: torch.Tensor, v: torch.Tensor, asked: Asked) -> str | None:
    if asked.softcap is not None:
        return "soft cap"
    if asked.sinks is not None:
        return "sinks"
    return "value heads of another size than query heads" if v.shape[-1] != q.shape[-1] else None


def _obstacle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """Why our own kernel cannot take these tensors, or None."""
    if not HAS_TRITON:
        return "Triton is not installed"
    if not uses_triton(q, k, v):
        return f"it does not run on {q.device.type} in {q.dtype}"
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        return f"heads of {max(q.shape[-1], v.shape[-1])} are wider than {WIDEST}"
    if q.is_cuda and not torch.backends.cuda.flash_sdp_enabled():
        return "flash attention is switched off"
    return None
