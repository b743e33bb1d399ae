"""Experts without numbers: what a grouped kernel keeps, and its operations, for a count on the meta device.

Transformers' own implementations look at which expert was chosen, or use products that the meta device does not have.
"""

# ruff: noqa: TID253
from __future__ import annotations

from typing import Any

import torch


class Grouped(torch.autograd.Function):
    """Keeps the tokens, their weights, and for every chosen expert as many columns as its layers are wide."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor, columns: int) -> torch.Tensor:
        ctx.save_for_backward(x, weights, x.new_empty(weights.numel(), columns))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weights, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weights), None


def experts(counted: list[float], module: Any, x: torch.Tensor, index: Any, weights: torch.Tensor, *_: Any) -> Any:
    """x (T, H), index and weights (T, k) -> (T, H); adds the operations to `counted`."""
    stacks = [p for p in module.parameters(recurse=False) if p.dim() == 3]
    size = sum(p.numel() // p.shape[0] for p in stacks)
    # forward, the gradient of tokens, and that of the experts if they train
    passes = 3 if any(p.requires_grad for p in stacks) else 2
    counted.append(2.0 * passes * weights.numel() * size)
    return Grouped.apply(x, weights, size // x.shape[-1])
