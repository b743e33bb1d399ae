"""The core's records about single forwards: what Transformers writes in many modeling files that no transform can run.

Each finds its sites by what a forward reads, not by a model's name, and overlays it there for one model. So a model
without a family is served like one that has a plugin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from opake.records import Skip, Undo

from .builtin import ModelRecord

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True, eq=False)
class OtherLoss(ModelRecord):
    """The loss of one row of a masked language model, or of a model that writes its loss out, inside transforms."""

    flag: ClassVar[str] = "batchify"

    def fits(self, module: nn.Module) -> Skip | None:
        from opake.batching import other_loss

        return other_loss.fits(module)

    def apply(self, module: nn.Module) -> Undo:
        from opake.batching import other_loss

        return other_loss.apply(module)


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentMasks(ModelRecord):
    """The padding mask of linear-attention, Mamba and convolution layers, used whatever it says."""

    flag: ClassVar[str] = "vmap_masking"

    def sites(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        from opake.masks import recurrent

        return recurrent.sites(model)

    def apply(self, module: nn.Module) -> Undo:
        from opake.masks import recurrent

        return recurrent.apply(self, module)


@dataclass(frozen=True, slots=True, eq=False)
class MaskBuilders(ModelRecord):
    """Masks of eager and hand-written attention, materialised whenever one is supplied."""

    flag: ClassVar[str] = "vmap_masking"

    def sites(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        from opake.masks import builders

        return builders.sites(model)

    def apply(self, module: nn.Module) -> Undo:
        from opake.masks import builders

        return builders.apply(module)


@dataclass(frozen=True, slots=True, eq=False)
class RouterLoss(ModelRecord):
    """The router's auxiliary loss, counted per row."""

    flag: ClassVar[str] = "moe"

    def sites(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        from opake.experts import aux_loss

        return aux_loss.sites(model)

    def apply(self, module: nn.Module) -> Undo:
        from opake.experts import aux_loss

        return aux_loss.apply(self, module)


@dataclass(frozen=True, slots=True, eq=False)
class EagerExperts(ModelRecord):
    """Experts that stock computes one by one after looking which were chosen, computed together inside transforms."""

    flag: ClassVar[str] = "moe"

    def sites(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        from opake.experts import eager

        return eager.sites(model)

    def fits(self, module: nn.Module) -> Skip | None:
        from opake.experts import eager

        return eager.fits(module)

    def apply(self, module: nn.Module) -> Undo:
        from opake.experts import eager

        return eager.apply(module)


@dataclass(frozen=True, slots=True, eq=False)
class ScatteredValues(ModelRecord):
    """Routers that scatter a number in place, which torch would do row by row inside transforms."""

    flag: ClassVar[str] = "moe"

    def sites(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        from opake.experts import scatter

        return scatter.sites(model)

    def apply(self, module: nn.Module) -> Undo:
        from opake.experts import scatter

        return scatter.apply(module)


@dataclass(frozen=True, slots=True, eq=False)
class NoLayerDrop(ModelRecord):
    """Layer dropout of probability zero, for which some models draw a number and branch on it."""

    flag: ClassVar[str] = "batchify"

    def sites(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        from opake.batching import layer_drop

        return layer_drop.sites(model)

    def fits(self, module: nn.Module) -> Skip | None:
        from opake.batching import layer_drop

        return layer_drop.fits(module)

    def apply(self, module: nn.Module) -> Undo:
        from opake.batching import layer_drop

        return layer_drop.apply(module)


@dataclass(frozen=True, slots=True, eq=False)
class OldFunctions(ModelRecord):
    """Autograd functions of the old form, given the form that transforms ask for."""

    flag: ClassVar[str] = "batchify"

    def sites(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        from opake.batching import functions

        return functions.sites(model)

    def apply(self, module: nn.Module) -> Undo:
        from opake.batching import functions

        return functions.apply(module)


REPAIRS = (
    OtherLoss,
    MaskBuilders,
    RecurrentMasks,
    RouterLoss,
    EagerExperts,
    ScatteredValues,
    NoLayerDrop,
    OldFunctions,
)
