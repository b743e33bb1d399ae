"""Find the Transformers model inside what the user holds, and its family."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opake import registry
from opake.errors import FamilyBlocked, GenericFamilyWarning, PatchError, UnknownFamily, UnsupportedModel

if TYPE_CHECKING:
    from torch import nn

_warned: set[str] = set()
# where a call of the user passes through before it arrives here
INSIDE = ("opake.patching", "contextlib")


@dataclass(frozen=True, slots=True)
class Target:
    """The innermost model and what lies around it, outermost first: PEFT, DDP, torch.compile."""

    model: nn.Module
    wrappers: tuple[nn.Module, ...]
    pretrained: bool

    @property
    def outermost(self) -> nn.Module:
        return self.wrappers[0] if self.wrappers else self.model


def locate(model: object) -> Target:
    """The target of a call.

    Raises:
        UnsupportedModel: not an `nn.Module`, or weights on the meta device.
    """
    from torch import nn

    from opake import hf

    if not isinstance(model, nn.Module):
        raise UnsupportedModel(f"expected a model (an nn.Module), got {type(model).__name__}: {model!r:.80}")
    wrappers: list[nn.Module] = []
    inner = model
    while (below := hf.wrapped(inner)) is not None and below is not inner:
        wrappers.append(inner)
        inner = below
    return Target(inner, tuple(wrappers), hf.is_pretrained(inner))


def require_weights(target: Target) -> None:
    """Refuse a model without data: its layers are replaced when the weights are loaded."""
    for name, parameter in target.model.named_parameters():
        if parameter.is_meta:
            raise UnsupportedModel(
                f"{type(target.model).__name__}.{name} is on the meta device, so there is nothing to patch yet; "
                "load the weights first (from_pretrained, or to_empty and load_state_dict), then patch"
            )


def require_own_forward(target: Target) -> None:
    """Refuse a model whose forward adds the batch dimension by hand: the patches would add and remove it again."""
    for module in (*target.wrappers, target.model):
        forward = vars(module).get("forward")
        if getattr(forward, "adds_batch_dim", False):
            name = type(module).__name__
            raise PatchError(
                f"{name}.forward is already wrapped by with_batch_dim, which apply_model_patches does itself; "
                "take the wrapper off (del model.forward), or pass batchify=False to keep it"
            )


def family_of(model_type: str, strict: bool) -> registry.Family | None:
    """The family plugin of a model_type; None stands for the generic patches, with one warning a model_type.

    Raises:
        UnknownFamily, FamilyBlocked: with `strict=True`, instead of the generic patches.
        FamilyConflict, FamilyImportError, FamilyInvalid: a broken installation is never passed over in silence.
    """
    try:
        return registry.load(model_type)
    except (UnknownFamily, FamilyBlocked) as error:
        if strict:
            raise
        if model_type not in _warned:
            _warned.add(model_type)
            text = f"{error}. Patching it generically: attention, masks, batching, cache and checkpointing only"
            warnings.warn(text, GenericFamilyWarning, stacklevel=_callers_level())
        return None


def _callers_level() -> int:
    """The `stacklevel` at which a warning of our caller points out of the patch engine, to the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(INSIDE):
        level, frame = level + 1, frame.f_back
    return level
