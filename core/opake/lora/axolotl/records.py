"""The records behind axolotl's switches: the same fusions as elsewhere, found in any decoder.

A record equals the one by which a family asks for the same thing, so a layer is never fused twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from opake.lora import mlp, qkv, w
from opake.patching.builtin import LoraProjection, ModelRecord
from opake.patching.undo import Skip, Undo, put
from opake.records import FuseMLP, FuseQKV, Record

from . import embedding, sites
from .obstacles import has_bias, obstacle
from .originals import QKV, original_apply_o, original_apply_qkv, output_name

if TYPE_CHECKING:
    from torch import nn

    from opake.patching.report import PatchReport

KEY = "_opake_axolotl"


class Holder:
    """What this module knows about one model: the report of its patches."""

    report: PatchReport | None = None


@dataclass(frozen=True, slots=True, eq=False)
class KernelRecord(ModelRecord):
    """Base of the records here; `like` is the record of the vocabulary that does the same."""

    like: ClassVar[type[Record] | None] = None

    def kept(self) -> Record:
        return self

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) or (self.like is not None and isinstance(other, self.like))

    def __hash__(self) -> int:
        return hash(type(self))


@dataclass(frozen=True, slots=True, eq=False)
class Kernels(KernelRecord):
    """Marks a model that was patched here, and holds the report."""

    flag: ClassVar[str] = "lora_w"

    def apply(self, module: nn.Module) -> Undo:
        return Undo([put(module, KEY, Holder())])


@dataclass(frozen=True, slots=True, eq=False)
class KernelProjection(LoraProjection):
    """LoRA projections of one kind: `qkv`, `o` or `mlp`."""

    kind: str = "o"

    def sites(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        return ((name, module) for name, module, kind in sites.projections(model) if kind == self.kind)

    def fits(self, module: nn.Module) -> Skip | None:
        if (skip := w.fits(module)) is not None:
            return skip
        reason = obstacle(module)
        return None if reason is None else Skip(reason)

    def kept(self) -> Record:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoraProjection)

    def __hash__(self) -> int:
        return hash(LoraProjection)

    def __str__(self) -> str:
        return f"KernelProjection({self.kind})"


@dataclass(frozen=True, slots=True, eq=False)
class KernelQKV(KernelRecord):
    """Query, key and value in one call."""

    flag: ClassVar[str] = "lora_qkv"
    like: ClassVar[type[Record] | None] = FuseQKV

    def sites(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        return sites.attentions(model)

    def fits(self, module: nn.Module) -> Skip | None:
        if (skip := qkv.fits(self, module)) is not None:  # type: ignore[arg-type]
            return skip
        return _first_obstacle(module, QKV)

    def apply(self, module: nn.Module) -> Undo:
        return qkv.apply(self, module)  # type: ignore[arg-type]

    def axis_parameters(self, module: nn.Module) -> frozenset[str]:
        return qkv.axis_parameters(self, module)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, eq=False)
class KernelMLP(KernelRecord):
    """A gated MLP in one call."""

    flag: ClassVar[str] = "lora_mlp"
    like: ClassVar[type[Record] | None] = FuseMLP

    def sites(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        return sites.mlps(model)

    def fits(self, module: nn.Module) -> Skip | None:
        if (skip := mlp.fits(self, module)) is not None:  # type: ignore[arg-type]
            return skip
        names = mlp.gated_mlp.projections(module) or ()
        biased = next((name for name in names if has_bias(module._modules[name])), None)
        return _first_obstacle(module, names) or (None if biased is None else Skip(f"{biased} has a bias"))

    def apply(self, module: nn.Module) -> Undo:
        return mlp.apply(self, module)  # type: ignore[arg-type]

    def axis_parameters(self, module: nn.Module) -> frozenset[str]:
        return mlp.axis_parameters(self, module)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, eq=False)
class KernelEmbedding(KernelRecord):
    """LoRA embeddings."""

    flag: ClassVar[str] = "lora_w"

    def sites(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        return sites.embeddings(model)

    def fits(self, module: nn.Module) -> Skip | None:
        return embedding.fits(module)

    def apply(self, module: nn.Module) -> Undo:
        return embedding.apply(module)


@dataclass(frozen=True, slots=True, eq=False)
class ApplyMethods(KernelRecord):
    """`apply_qkv` and `apply_o` on attention modules, as axolotl binds them, for scripts that call them."""

    flag: ClassVar[str] = "lora_w"

    def sites(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for name, module in sites.attentions(model):
            if output_name(module) is not None and not hasattr(type(module), "apply_qkv"):
                yield name, module

    def apply(self, module: nn.Module) -> Undo:
        bound = {"apply_qkv": MethodType(_apply_qkv, module), "apply_o": MethodType(original_apply_o, module)}
        return Undo([put(module, name, method) for name, method in bound.items()])


def _apply_qkv(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value, in one call where they are fused."""
    if qkv.is_fused(self):
        return qkv.scoped(original_apply_qkv, self, hidden_states)
    return original_apply_qkv(self, hidden_states)


def _first_obstacle(module: nn.Module, names: tuple[str, ...]) -> Skip | None:
    for name in names:
        reason = obstacle(module._modules[name])
        if reason is not None:
            return Skip(f"{name}: {reason}")
    return None
