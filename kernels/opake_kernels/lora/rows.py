"""The canonical layout of the LoRA ops: rows as contiguous (G, R, C), gradients of weights back in their groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from opake_kernels.fold import fold_rows

__all__ = ["folded_rows", "like_groups", "trace"]


def folded_rows(x: torch.Tensor, groups: int) -> torch.Tensor:
    """(*groups, ..., C) -> contiguous (G, R, C): a strided or expanded one would be copied by every product."""
    return fold_rows(x, groups).contiguous()


def trace(x: torch.Tensor, groups: int) -> torch.Tensor:
    """An empty differentiable output, kept for backward where the rows are not.

    It ties the gradients to the inputs, so that differentiating them a second time raises instead of missing a term.
    """
    return x.new_empty(*x.shape[:groups], 0)


def like_groups(grad: torch.Tensor | None, groups: Sequence[int]) -> torch.Tensor | None:
    """(G, ...) -> (*groups, ...), a view."""
    return None if grad is None else grad.view(*groups, *grad.shape[1:])
