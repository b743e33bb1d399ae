"""The canonical layout of the LoRA ops: contiguous rows of all groups, gradients of weights back in their groups.

Also how the rows are shared out, where a backward takes them a part at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch

__all__ = ["flat_rows", "group_count", "like_groups", "shares", "together", "trace", "unflat_rows"]

# rows of a lone group are shared out in multiples of the matrix unit's tile
TILE = 128


def flat_rows(x: torch.Tensor) -> torch.Tensor:
    """(*groups, ..., C) -> contiguous (N, C): a strided or expanded one would be copied by every product."""
    N, C = math.prod(x.shape[:-1]), x.shape[-1]
    if not x.is_contiguous():
        return x.reshape(N, C).contiguous()
    return x if x.dim() == 2 else x.view(N, C)


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


def shares(N: int, G: int, count: int) -> list[tuple[int, int, int]]:
    """(first row, last row, groups) of at most `count` parts: of the groups, or of the rows of a lone group."""
    if count <= 1:
        return [(0, N, G)]
    if G > 1:
        count = min(count, G)
        ends = [i * G // count for i in range(count + 1)]
        return [(a * (N // G), b * (N // G), b - a) for a, b in pairwise(ends)]
    step = -(-N // (count * TILE)) * TILE
    return [(a, min(a + step, N), 1) for a in range(0, N, step)]


def together(parts: Sequence[Sequence[torch.Tensor | None]], G: int) -> list[torch.Tensor | None]:
    """Sums (G, ...) from those of each share: of the groups side by side, of a lone group added."""
    return [_joined([s for s in each if s is not None], G) for each in zip(*parts, strict=True)]


def _joined(parts: list[torch.Tensor], G: int) -> torch.Tensor | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    return torch.cat([s.mT for s in parts]).mT if G > 1 else sum(parts[1:], parts[0])
