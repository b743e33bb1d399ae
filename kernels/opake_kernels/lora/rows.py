"""The canonical layout of the LoRA ops: rows as contiguous (G, R, C), gradients of weights back in their groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from opake_kernels.fold import fold_rows

__all__ = ["folded_rows", "like_groups"]


def folded_rows(x: torch.Tensor, groups: int) -> torch.Tensor:
    """(*groups, ..., C) -> contiguous (G, R, C): a strided or expanded one would be copied by every product."""
    return fold_rows(x, groups).contiguous()


def like_groups(grad: torch.Tensor | None, groups: Sequence[int]) -> torch.Tensor | None:
    """(G, ...) -> (*groups, ...), a view."""
    return None if grad is None else grad.view(*groups, *grad.shape[1:])
