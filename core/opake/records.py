"""The vocabulary of a family: what a plugin may say about its model. Importing it imports nothing heavy.

A record names a site (a class of the Transformers modeling module, or the module itself) and the flag that switches
it. It finds its sites in a model, says whether one fits, applies itself and returns the undo. Hooks return records and
patch nothing themselves, so a plan can be printed, applied twice without harm, and undone. How an op is put in place is
the business of the file named in `_through`; a record only says where.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from .hookspecs import hookimpl
from .patching.undo import Skip, Undo

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "AddRMSNorm",
    "Attention",
    "ClassRecord",
    "CrossEntropy",
    "Experts",
    "FuseMLP",
    "FuseQKV",
    "GatedMLP",
    "LinearCrossEntropy",
    "RMSNorm",
    "Record",
    "RecurrentMask",
    "Replace",
    "Rotary",
    "RotaryUpdate",
    "RouterAuxLoss",
    "Skip",
    "Undo",
    "hookimpl",
]


@dataclass(frozen=True, slots=True)
class Record:
    """Base of all records: subclass it in a plugin to patch something that the vocabulary has no word for.

    A subclass sets `flag` and implements `sites`, `apply` and, where it depends on the instance, `fits`.
    """

    flag: ClassVar[str] = ""

    def sites(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """(qualified name, module) of every place in `model` that this record is about."""
        raise NotImplementedError(f"{type(self).__name__} does not say where it applies")

    def fits(self, module: nn.Module) -> Skip | None:
        """None if the record can be applied to `module`, else why not. Must not change anything."""
        return None

    def apply(self, module: nn.Module) -> Undo:
        """Patch `module` and return what takes the patch back."""
        raise NotImplementedError(f"{type(self).__name__} cannot be applied")

    def lapsed(self, module: nn.Module) -> bool:
        """Whether somebody overwrote what this record did to `module`, so that patching again does it again."""
        return False

    def remark(self, module: nn.Module) -> str:
        """What the report should say about applying this to `module`, asked before it is applied."""
        return ""

    def axis_parameters(self, module: nn.Module) -> frozenset[str]:
        """Names of the module's own parameters that the patched op takes with a leading example axis."""
        return frozenset()

    def kept(self) -> Record:
        """What the state of a patched model keeps of this record: itself, without references to other models."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Record:
        # a record is a value: a deep copy of a patched model shares it
        return self

    def __str__(self) -> str:
        values = [(field, getattr(self, field.name)) for field in fields(self)]
        return f"{type(self).__name__}({', '.join(_shown(value) for field, value in values if value != field.default)})"


def _shown(value: object) -> str:
    return getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or repr(value)


@dataclass(frozen=True, slots=True)
class ClassRecord(Record):
    """A record about every instance of one class of the modeling module; your own implements `fits` and `apply`."""

    cls: Any
    _through: ClassVar[str | None] = None

    def sites(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if isinstance(self.cls, type):
            for name, module in model.named_modules():
                if isinstance(module, self.cls):
                    yield name, module

    def fits(self, module: nn.Module) -> Skip | None:
        return Skip("not available yet") if self._through is None else self._implementation().fits(self, module)

    def apply(self, module: nn.Module) -> Undo:
        return self._implementation().apply(self, module)

    def axis_parameters(self, module: nn.Module) -> frozenset[str]:
        if self._through is None:
            return frozenset()
        return getattr(self._implementation(), "axis_parameters", lambda *_: frozenset())(self, module)

    def _implementation(self) -> Any:
        return importlib.import_module(f"opake.{self._through}")


@dataclass(frozen=True, slots=True)
class Rotary(ClassRecord):
    """Rotary embedding of queries and keys, wherever a module of the family calls `apply_rotary_pos_emb`.

    cls: the modeling module (`hf`) whose attention classes call it.
    """

    flag: ClassVar[str] = "rope"
    _through: ClassVar[str | None] = "rows.rotary"

    def sites(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        yield from self._implementation().sites(self, model)


@dataclass(frozen=True, slots=True)
class RMSNorm(ClassRecord):
    """Root-mean-square normalisation; weight offset and cast order are found by looking at the module's own numbers."""

    flag: ClassVar[str] = "rms_norm"
    _through: ClassVar[str | None] = "rows.rms_norm"


@dataclass(frozen=True, slots=True)
class AddRMSNorm(ClassRecord):
    """Residual addition followed by `RMSNorm` in a decoder layer that adds first and normalises the sum.

    cls: the decoder layer. addend, norm: its submodules whose output is added, and that normalises the sum.
    """

    addend: str = "self_attn"
    norm: str = "post_attention_layernorm"
    flag: ClassVar[str] = "rms_norm"
    _through: ClassVar[str | None] = "rows.add_rms_norm"


@dataclass(frozen=True, slots=True)
class GatedMLP(ClassRecord):
    """Gated MLP; the activation is read from the module, so `config.hidden_act` is honoured."""

    flag: ClassVar[str] = "activation"
    _through: ClassVar[str | None] = "rows.gated_mlp"


@dataclass(frozen=True, slots=True)
class CrossEntropy(ClassRecord):
    """Cross-entropy over logits, installed through the public `loss_function` of the causal LM."""

    flag: ClassVar[str] = "cross_entropy"
    _through: ClassVar[str | None] = "rows.cross_entropy"


@dataclass(frozen=True, slots=True)
class LinearCrossEntropy(ClassRecord):
    """Loss straight from hidden states when a call asks for `loss_only=True`; other calls run as they are."""

    flag: ClassVar[str] = "fused_linear_cross_entropy"
    _through: ClassVar[str | None] = "lm_head.wrapper"


@dataclass(frozen=True, slots=True)
class FuseQKV(ClassRecord):
    """Query, key and value projections of one input, computed in one call with their LoRA adapters."""

    flag: ClassVar[str] = "lora_qkv"
    _through: ClassVar[str | None] = "lora.qkv"


@dataclass(frozen=True, slots=True)
class FuseMLP(ClassRecord):
    """Gate, up and down projections and the activation between, in one call with their LoRA adapters."""

    flag: ClassVar[str] = "lora_mlp"
    _through: ClassVar[str | None] = "lora.mlp"


@dataclass(frozen=True, slots=True)
class Experts(ClassRecord):
    """Stacked experts of a mixture-of-experts block; the gate is found by looking at the module's own numbers."""

    flag: ClassVar[str] = "moe"
    _through: ClassVar[str | None] = "experts.install"

    def remark(self, module: nn.Module) -> str:
        return self._implementation().remark(self, module)


@dataclass(frozen=True, slots=True)
class RouterAuxLoss(ClassRecord):
    """Load-balancing loss of the router, per example and without a write into an unmapped tensor.

    The core finds Transformers' usual `load_balancing_loss_func` itself; naming the class says that it must be there.
    """

    flag: ClassVar[str] = "moe"
    _through: ClassVar[str | None] = "experts.aux_loss"


@dataclass(frozen=True, slots=True)
class RecurrentMask(ClassRecord):
    """Padding mask of linear-attention layers, decided without looking at its values.

    The core finds Transformers' usual functions itself; naming the class says that one must be there.
    """

    flag: ClassVar[str] = "vmap_masking"
    _through: ClassVar[str | None] = "masks.recurrent"


@dataclass(frozen=True, slots=True)
class RotaryUpdate(ClassRecord):
    """Rotary tables that depend on the sequence length, computed per row instead of by a branch on values.

    The core finds `dynamic` and `longrope` tables itself; name a class here only if it keeps them under other names.
    """

    flag: ClassVar[str] = "batchify"
    _through: ClassVar[str | None] = "batching.rotary"


@dataclass(frozen=True, slots=True)
class Attention(ClassRecord):
    """An attention class that needs more than the core's folded attention: a soft cap on the scores, or sinks."""

    softcap: float | None = None
    sinks: str | None = None
    flag: ClassVar[str] = "eager_attention"


@dataclass(frozen=True, slots=True)
class Replace(ClassRecord):
    """A module-level function `name` that `cls.forward` calls, replaced by `fn` for the instances of one model only."""

    name: str = ""
    fn: Callable[..., Any] | None = None
    flag: ClassVar[str] = "batchify"
    _through: ClassVar[str | None] = "patching.replace"
