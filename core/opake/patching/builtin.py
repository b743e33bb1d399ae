"""The core's own records: what every decoder needs under transforms, whatever its family.

Each says where it applies and hands the work to the package that knows how. A family adds to these, it does not repeat
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from opake.records import Experts, LinearCrossEntropy, Record, Skip, Undo

if TYPE_CHECKING:
    from torch import nn

    from .target import Target


@dataclass(frozen=True, slots=True)
class ModelRecord(Record):
    """A record about the model as a whole; `wrappers` are what lies around it."""

    wrappers: tuple[nn.Module, ...] = ()

    def sites(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        yield "", model

    def kept(self) -> Record:
        return type(self)()

    def __str__(self) -> str:
        return type(self).__name__

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


@dataclass(frozen=True, slots=True, eq=False)
class FoldedAttention(ModelRecord):
    """Attention through the public interface: one fused call a microbatch, forward and backward."""

    flag: ClassVar[str] = "eager_attention"

    def fits(self, module: nn.Module) -> Skip | None:
        from opake.attention import eager, interface

        return None if eager.serves(module) else interface.fits(module)

    def lapsed(self, module: nn.Module) -> bool:
        from opake.attention import eager, interface

        return not eager.serves(module) and interface.lacks(module, attention=True)

    def remark(self, module: nn.Module) -> str:
        from opake.attention import eager, interface

        if eager.serves(module):
            return "inside transforms by triton, in place of eager"
        return interface.remark(module)

    def apply(self, module: nn.Module) -> Undo:
        from opake.attention import eager, interface

        if eager.serves(module):
            return eager.apply(module)
        return interface.select(module, self.wrappers, attention=True)


@dataclass(frozen=True, slots=True, eq=False)
class Masking(ModelRecord):
    """Masks through the public interface: materialised whenever one is supplied, whatever it says."""

    flag: ClassVar[str] = "vmap_masking"

    def fits(self, module: nn.Module) -> Skip | None:
        from opake.attention import interface

        return interface.fits(module)

    def lapsed(self, module: nn.Module) -> bool:
        from opake.attention import interface

        return interface.lacks(module, masks=True)

    def apply(self, module: nn.Module) -> Undo:
        from opake.attention import interface

        return interface.select(module, self.wrappers, masks=True)


@dataclass(frozen=True, slots=True, eq=False)
class Batchify(ModelRecord):
    """The batch dimension that vmap takes away, and no KV cache inside a transform; on the model and its wrappers."""

    flag: ClassVar[str] = "batchify"

    def sites(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        yield "", model
        for wrapper in self.wrappers:
            yield type(wrapper).__name__, wrapper

    def fits(self, module: nn.Module) -> Skip | None:
        from opake.batching import forward

        return forward.fits(module)

    def apply(self, module: nn.Module) -> Undo:
        from opake.batching import forward

        return forward.apply(module)


@dataclass(frozen=True, slots=True, eq=False)
class PerExampleLoss(ModelRecord):
    """The causal loss of one row, normalised by that row's own labels, inside transforms."""

    flag: ClassVar[str] = "batchify"

    def fits(self, module: nn.Module) -> Skip | None:
        from opake.batching import loss

        return loss.fits(module)

    def apply(self, module: nn.Module) -> Undo:
        from opake.batching import loss, masked_loss

        return Undo([*loss.apply(module).changes, *masked_loss.apply(module)])


@dataclass(frozen=True, slots=True, eq=False)
class RotaryTables(ModelRecord):
    """`dynamic` and `longrope` rotary tables, computed per row inside transforms."""

    flag: ClassVar[str] = "batchify"

    def sites(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        from opake.batching import rotary

        for name, module in model.named_modules():
            if rotary.updates(module):
                yield name, module

    def apply(self, module: nn.Module) -> Undo:
        from opake.batching import rotary

        return rotary.apply(self, module)


@dataclass(frozen=True, slots=True, eq=False)
class PaddingCheck(ModelRecord):
    """Transformers' warning about padding without a mask reads values; it is silent inside transforms."""

    flag: ClassVar[str] = "batchify"

    def sites(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        from opake.batching import padding_check

        for name, module in model.named_modules():
            if padding_check.has_check(module):
                yield name, module

    def apply(self, module: nn.Module) -> Undo:
        from opake.batching import padding_check

        return padding_check.apply(module)


@dataclass(frozen=True, slots=True, eq=False)
class Rematerialise(ModelRecord):
    """Gradient checkpointing that works inside transforms, switched on before or after patching."""

    flag: ClassVar[str] = "vmap_checkpointing"

    def fits(self, module: nn.Module) -> Skip | None:
        if getattr(module, "supports_gradient_checkpointing", False):
            return None
        return Skip(f"{type(module).__name__} does not support gradient checkpointing")

    def apply(self, module: nn.Module) -> Undo:
        from opake.checkpoint import model

        return model.apply(module, self.wrappers)


@dataclass(frozen=True, slots=True, eq=False)
class KVCache(ModelRecord):
    """No cache is allocated by a training forward that did not ask for one."""

    flag: ClassVar[str] = "kv_cache"

    def fits(self, module: nn.Module) -> Skip | None:
        from opake.batching import cache

        return cache.fits(module)

    def apply(self, module: nn.Module) -> Undo:
        from opake.batching import cache

        return cache.apply(module)


@dataclass(frozen=True, slots=True, eq=False)
class LoraProjection(ModelRecord):
    """Every linear layer with a LoRA adapter, base and adapter in one call; FuseQKV and FuseMLP go further."""

    flag: ClassVar[str] = "lora_w"

    def sites(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        from opake.lora import w

        return w.sites(model)

    def fits(self, module: nn.Module) -> Skip | None:
        from opake.lora import w

        return w.fits(module)

    def apply(self, module: nn.Module) -> Undo:
        from opake.lora import w

        return w.apply(module)

    def axis_parameters(self, module: nn.Module) -> frozenset[str]:
        from opake.lora import w

        return w.axis_parameters(module)


@dataclass(frozen=True, slots=True, eq=False)
class LoraParameter(ModelRecord):
    """LoRA on a bare parameter, such as stacked experts or a router, put in place without a write inside transforms."""

    flag: ClassVar[str] = "batchify"

    def sites(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        from opake.lora import parameters

        return parameters.sites(model)

    def fits(self, module: nn.Module) -> Skip | None:
        from opake.lora import parameters

        return parameters.fits(module)

    def apply(self, module: nn.Module) -> Undo:
        from opake.lora import parameters

        return parameters.apply(module)

    def axis_parameters(self, module: nn.Module) -> frozenset[str]:
        from opake.lora import parameters

        return parameters.axis_parameters(module)


@dataclass(frozen=True, slots=True, eq=False)
class GroupedExperts(ModelRecord):
    """Experts that compute only the tokens that chose them; without it every expert computes every token."""

    flag: ClassVar[str] = "grouped_moe"

    def sites(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        from opake.experts import paths

        return paths.sites(model)

    def remark(self, module: nn.Module) -> str:
        from opake.experts import paths

        return paths.remark(module)

    def apply(self, module: nn.Module) -> Undo:
        from opake.experts import paths

        return paths.apply(module)


@dataclass(frozen=True, slots=True, eq=False)
class NoDropout(ModelRecord):
    """Every dropout probability of the model set to zero until restore."""

    flag: ClassVar[str] = "dropout"

    def apply(self, module: nn.Module) -> Undo:
        from opake.batching import dropout

        return dropout.apply(module, self.wrappers)


def core_records(target: Target) -> list[Record]:
    """The records of every model, in the order in which they are applied."""
    from .repairs import REPAIRS

    around = target.wrappers
    first = (FoldedAttention, Masking, PerExampleLoss, RotaryTables, PaddingCheck, Rematerialise, NoDropout)
    return [kind(around) for kind in (*first, *REPAIRS, KVCache, LoraProjection, LoraParameter, Batchify)]


def generic_records(target: Target, planned: list[Record]) -> list[Record]:
    """What comes after a family's records: the loss without logits, if unclaimed, and the paths of its experts."""
    claimed = any(record.flag == "fused_linear_cross_entropy" for record in planned)
    found: list[Record] = [] if claimed else [LinearCrossEntropy(type(target.model))]
    return [*found, GroupedExperts(target.wrappers)] if any(isinstance(r, Experts) for r in planned) else found


def forget_registrations() -> None:
    """Take our keys out of Transformers' public tables; called when no patched model is left."""
    from opake.attention import interface
    from opake.experts import install

    interface.unregister()
    install.unregister()
