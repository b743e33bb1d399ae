"""Two words that the vocabulary of opake lacks: LayerNorm as a class computes it, and an MLP without a gate.

A record is data and imports nothing heavy. How it is put in place is in `norm_site` and `mlp_site`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from opake.records import ClassRecord, Skip, Undo

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class LayerNorm(ClassRecord):
    """LayerNorm over the last dimension; whether the weight is an offset from one is found by running the class."""

    flag: ClassVar[str] = "rms_norm"

    def fits(self, module: nn.Module) -> Skip | None:
        from . import norm_site

        return norm_site.fits(module)

    def apply(self, module: nn.Module) -> Undo:
        from . import norm_site

        return norm_site.apply(module)

    def axis_parameters(self, module: nn.Module) -> frozenset[str]:
        return frozenset(name for name, _ in module.named_parameters(recurse=False))


@dataclass(frozen=True, slots=True)
class PlainMLP(ClassRecord):
    """An MLP without a gate, down(relu(up(x))^2), with a kernel for the activation."""

    flag: ClassVar[str] = "activation"

    def fits(self, module: nn.Module) -> Skip | None:
        from . import mlp_site

        return mlp_site.fits(module)

    def apply(self, module: nn.Module) -> Undo:
        from . import mlp_site

        return mlp_site.apply(module)
