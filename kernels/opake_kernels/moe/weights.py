"""The weights of one call, folded: what all examples share stays one stack, what differs becomes experts of its own.

An expert that differs between examples is simply another expert, (G * E) of them, so no product has to know of groups.
Low-rank factors are cast to the compute dtype here, once a call; gradients leave in the dtype of the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opake_kernels.fold import fold_shared
from opake_kernels.lora.products import cast, fold_weight

__all__ = ["NAMES", "Weights", "gather"]

Optional = torch.Tensor | None
NAMES: tuple[str, ...] = ("gate_up", "down", "gate_up_bias", "down_bias", "A", "B", "A_down", "B_down")


@dataclass(slots=True)
class Weights:
    """gate_up (E, 2I, H), down (E, H, I), biases (E, 2I), (E, H); A (E, H, r), B (E, r, 2I), A_down (E, I, r),
    B_down (E, r, H), each with its `scaling`. E counts the experts of all examples where `shared` is False."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: Optional
    down_bias: Optional
    A: Optional
    B: Optional
    A_down: Optional
    B_down: Optional
    scalings: tuple[float, float]
    shared: bool

    @property
    def sizes(self) -> tuple[int, int, int]:
        """E, I, H."""
        E, H, I = self.down.shape
        return E, I, H


def gather(given: Sequence[Optional], scalings: tuple[float, float], groups: int, like: torch.Tensor) -> Weights:
    """Fold weights in the order of NAMES, each SHARED (*groups or ones, E, ...); `like`: rows with all groups."""
    dims = [3, 3, 2, 2, 3, 3, 3, 3]
    folded = [None if w is None else fold_weight(w, groups, like) for w in given]
    shared = all(w is None or w.dim() == dim for w, dim in zip(folded, dims, strict=True))
    if not shared:
        folded = [None if w is None else _each(w, groups, like) for w in given]
    folded = [None if w is None else cast(w, like.dtype) for w in folded]
    gate_up, down, *rest = folded
    assert gate_up is not None
    assert down is not None
    named: dict[str, Any] = dict(zip(NAMES[2:], rest, strict=True))
    return Weights(gate_up, down, **named, scalings=scalings, shared=shared)


def _each(w: torch.Tensor, groups: int, like: torch.Tensor) -> torch.Tensor:
    """(G * E, ...): the experts of every example, copied where they are shared."""
    w = fold_shared(w, groups, like)
    G = 1
    for size in like.shape[:groups]:
        G *= size
    return w.expand(G, *w.shape[1:]).flatten(0, 1)
