"""The canonical layout of the LoRA ops: contiguous rows of all groups, gradients of weights back in their groups."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["flat_rows", "group_count", "like_groups", "trace", "unflat_rows"]


def flat_rows(x: torch.Tensor) -> torch.Tensor:
    """(*groups, ..., C) -> contiguous (N, C): a strided or expanded one would be copied by every product."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).contiguous()


def unflat_rows(y: torch.Tensor, lead: Sequence[int]) -> torch.Tensor:
    """(N, C) -> (*lead, C) as a tensor of its own: the user of an output may write into it, as models do."""
    return torch.ops.aten._unsafe_view(y, [*lead, y.shape[1]])


def group_count(x: torch.Tensor, groups: int) -> int:
    """G, the product of the first `groups` dimensions."""
    return math.prod(x.shape[:groups])


def trace(x: torch.Tensor, groups: int) -> torch.Tensor:
    """An empty differentiable output, kept for backward where the rows are not.

    It ties the gradients to the inputs, so that differentiating them a second time raises instead of missing a term.
    """
    return x.new_empty(*x.shape[:groups], 0)


def like_groups(grad: torch.Tensor | None, groups: Sequence[int]) -> torch.Tensor | None:
    """(G, ...) -> (*groups, ...), a view."""
    return None if grad is None else grad.view(*groups, *grad.shape[1:])
