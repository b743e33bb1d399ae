"""Which indices of logits (..., V) their hidden states (..., H) can be given instead; nothing is computed here."""

# ruff: noqa: TID253
from __future__ import annotations

import math
from typing import Any

import torch

_MASKS = (torch.bool, torch.uint8)


def spares_the_last(index: Any, ndim: int) -> bool:
    """Whether an index leaves the last of `ndim` dimensions whole, and last."""
    items = _items(index)
    used = sum(map(_dimensions, items))
    if used <= ndim and items and _is_whole(items[-1]):
        return True
    return used < ndim and not any(item is Ellipsis for item in items[:-1])


def spares_the_first(index: Any, ndim: int) -> bool:
    """Whether an index that spares the last dimension leaves the order of the first one's entries as it is."""
    items = [item for item in _items(index) if item is not None]
    # several of these may move what they select to the front
    if sum(isinstance(item, int | torch.Tensor) for item in items) > 1:
        return False
    if not items or _is_whole(items[0]):
        return True
    return items[0] is Ellipsis and sum(map(_dimensions, items)) < ndim


def _items(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _dimensions(item: Any) -> float:
    """How many dimensions one item of an index uses; more than there are for a kind that is not known here."""
    if isinstance(item, torch.Tensor):
        return item.dim() if item.dtype in _MASKS else 1
    if isinstance(item, int | slice) and not isinstance(item, bool):
        return 1
    return 0 if item is None or item is Ellipsis else math.inf


def _is_whole(item: Any) -> bool:
    return isinstance(item, slice) and item == slice(None)
