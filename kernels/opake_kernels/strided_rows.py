"""Rows of a strided tensor, read where they lie: transposed, sliced and expanded views need no copy.

A kernel that walks rows wants row r at one address formula. Two nested strides serve every view a model makes of its
projections: row r starts at (r // inner) * outer + (r % inner) * step. A dense tensor is (inner 1, outer C, step 0),
which Triton folds away. Where the order of rows is free, they are taken in the order of memory, so that a transposed
view of a dense tensor is dense again. Leaves out column strides other than one: those are copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["dense_like", "invert", "memory_order", "row_strides"]


def dense_like(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An empty dense tensor of the shape of `x`, by the shorter call where there is one."""
    if x.is_contiguous() and (dtype is None or dtype == x.dtype):
        return torch.empty_like(x)
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


def memory_order(x: torch.Tensor, fixed: int) -> tuple[int, ...] | None:
    """The permutation that sorts the row dimensions after the first `fixed` by falling stride; None if they are sorted.

    The last dimension (the columns) stays; so do dimensions of size one and expanded ones.
    """
    if x.is_contiguous():
        return None
    last = x.dim() - 1
    rows = [d for d in range(fixed, last) if x.shape[d] != 1 and x.stride(d) != 0]
    ordered = sorted(rows, key=lambda d: -x.stride(d))
    if ordered == rows:
        return None
    order = list(range(x.dim()))
    for at, source in zip(rows, ordered, strict=True):
        order[at] = source
    return tuple(order)


def invert(order: Sequence[int]) -> tuple[int, ...]:
    """The permutation that undoes `order`."""
    inverse = [0] * len(order)
    for at, source in enumerate(order):
        inverse[source] = at
    return tuple(inverse)


def row_strides(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """`x` (copied only if two nested strides cannot reach its rows) and (inner, outer, step) in elements."""
    C = x.shape[-1]
    if x.is_contiguous():
        return x, 1, C, 0
    levels: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if levels and levels[-1][1] == size * stride:
            levels[-1] = (levels[-1][0] * size, stride)
        else:
            levels.append((size, stride))
    if len(levels) > 2 or (C > 1 and x.stride(-1) != 1):
        return x.contiguous(), 1, C, 0
    if len(levels) == 2:
        (_, outer), (inner, step) = levels
        return x, inner, outer, step
    return x, 1, levels[0][1] if levels else C, 0
