"""What deferred logits are made of: one call of a head, and the scale and soft cap applied to its result so far."""

# ruff: noqa: TID253
from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .deferred import DeferredLogits


@dataclass(eq=False)
class Head:
    """One call of a head: its arguments, how it computes logits, and where a reason is noted.

    weight (V, H), or (B, V, H) where each example has its own; bias (V) or (B, V). by_row: the losses are to be those
    of rows, so that a mean over no label is 0.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    compute: Callable[[], torch.Tensor]
    note: Callable[[str], None]
    chunk: int | bool | None = None
    by_row: bool = False
    nodes: list[weakref.ref[DeferredLogits]] = field(default_factory=list)

    def materialise(self, reason: str) -> None:
        """Compute the logits and replay on them what was done so far, in order."""
        self.note(reason)
        for ref in self.nodes:
            node = ref()
            if node is not None:
                node.tensor = node.replay()


@dataclass(frozen=True)
class Scaling:
    """logits -> after * tanh(before * logits) if capped, else before * logits."""

    before: float = 1.0
    capped: bool = False
    after: float = 1.0

    def times(self, factor: float) -> Scaling:
        if self.capped:
            return Scaling(self.before, True, self.after * factor)
        return Scaling(self.before * factor)

    def options(self) -> dict[str, float]:
        """As keywords of the fused loss: cap * tanh(scale * logits / cap)."""
        if not self.capped:
            return {"logit_scale": self.before}
        return {"logit_scale": self.before * self.after, "logit_softcapping": self.after}


PLAIN = Scaling()
