"""Attention without numbers: the tensors that a fused kernel keeps, and its operations, for a count on the meta device.

Transformers' own attention falls apart into products of T x T scores there, which no fused kernel keeps.
"""

# ruff: noqa: TID253
from __future__ import annotations

from typing import Any

import torch

# backward multiplies five times where forward does twice, and a causal mask spares half
FORWARD_AND_BACKWARD = (2 + 5) * 2 / 2


class Fused(torch.autograd.Function):
    """Keeps queries, keys, values, the output and a number a row; the output has no values."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(torch.empty_like(t) for t in ctx.saved_tensors[:3])


def attention(
    counted: list[float], module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
) -> Any:
    """q (B, N, T, D), k and v (B, K, T, D) -> (B, T, N, D), None; adds the operations to `counted`."""
    B, N, T, D = q.shape
    counted.append(FORWARD_AND_BACKWARD * B * N * T * k.shape[2] * (D + v.shape[-1]) / 2)
    return Fused.apply(q, k, v).transpose(1, 2), None
