"""`restore`: take back what the functions of this package did to a model, to a class, or everywhere."""

from __future__ import annotations

from torch import nn

from opake.errors import RestoreConflict, UnsupportedModel
from opake.patching import state
from opake.patching.chosen import undo_records
from opake.patching.target import locate
from opake.records import Record

from . import class_patch
from .kernels import SOURCE
from .records import KernelProjection, KernelRecord, Kernels


def restore(target: nn.Module | type[nn.Module] | None = None) -> None:
    """Undo, `is`-identical; a target that was never patched here is left alone.

    target: a model (what `apply_lora_kernel_patches` did to it; patches of `opake.patches` stay), an attention class
        (what `patch_self_attn_lora` did to it), or None: every model, deep copies too, and every class

    Raises:
        RestoreConflict: somebody put something on top of ours since; that target is unchanged.
        UnsupportedModel (a TypeError): neither a model nor a class.
    """
    if target is None:
        _restore_all()
    elif isinstance(target, type):
        class_patch.restore(target)
    elif isinstance(target, nn.Module):
        _restore_model(target)
    else:
        raise UnsupportedModel(f"restore takes a model, an attention class or None, got {type(target).__name__}")


def _restore_model(model: nn.Module) -> None:
    try:
        undo_records(model, _is_ours, SOURCE)
    except RestoreConflict as error:
        found = state.state_of(locate(model).model)
        if found is None or all(_is_ours(entry.record) for entry in found.applied):
            raise
        raise RestoreConflict(
            f"{error}. If that is a patch of opake.patches, opake.patches.restore(model) takes everything back at once"
        ) from error


def _restore_all() -> None:
    """Every model and class; one that cannot be restored keeps none of the others from it, and is named at the end."""
    conflicts = []
    for target in (*_models(), *class_patch.patched_classes()):
        try:
            restore(target)
        except RestoreConflict as error:
            conflicts.append(error)
    if conflicts:
        raise conflicts[0]


def _is_ours(record: Record) -> bool:
    return isinstance(record, KernelRecord | KernelProjection)


def _models() -> list[nn.Module]:
    applied = (entry for each in list(state._live) for entry in each.applied)
    return [entry.module for entry in applied if isinstance(entry.record, Kernels)]
