"""Plan, apply, report, restore: the one place where records meet a model.

Everything that can fail on bad input is asked before the first change; should a record fail while it is applied, the
changes of the call are taken back. What a record does is its own business.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from opake.errors import OptionTypeError, RestoreConflict, UnsupportedModel
from opake.registry import Planned

from . import asked, copies, notes
from .asked import CORE
from .flags import FLAGS, Switches, resolve
from .interfaces import warn_of_changes
from .report import PatchReport, Row
from .state import Applied, ModelState, any_live, close_state, open_state, state_of
from .target import Target, family_of, locate, require_own_forward, require_weights
from .undo import Skip, conflicts

if TYPE_CHECKING:
    from torch import nn


def apply_model_patches(
    model: nn.Module,
    *,
    compat: bool = True,
    performance: bool = True,
    kernels: bool | None = None,
    peft: bool = True,
    strict: bool = False,
    **flags: Any,
) -> PatchReport:
    """Patch one model for per-example gradients and fused kernels; nothing outside the model changes.

    Call it after the model is built and adapters are attached. Calling it again applies what is new and reports the
    rest as `already`. `opake.patches.restore(model)` takes everything back.

    model: a Transformers model, or one wrapped by PEFT, DistributedDataParallel or torch.compile
    compat: what the model needs under `torch.func.vmap`
    performance: no cache allocation while training; the loss-only head
    kernels: the row kernels; None follows `performance`; off without CUDA and Triton
    peft: fused LoRA, where adapters are found
    strict: an unregistered model_type is an error instead of a warning and the generic patches
    flags: per-concern overrides, see docs/flags.md; an explicit True is honoured on any machine

    Returns the report: every record with its state and reason.

    Raises:
        UnsupportedModel: not a model, weights on the meta device, or no Transformers model with `compat=True`.
        PatchError: the forward adds a batch dimension by hand (`with_batch_dim`), with `batchify` on.
        UnknownOption, OptionTypeError: a bad keyword or value.
        UnknownFamily, FamilyBlocked: with `strict=True`.
        FamilyConflict, FamilyImportError, FamilyInvalid: a broken plugin.
    """
    umbrellas = {"compat": compat, "performance": performance, "kernels": kernels, "peft": peft}
    report, _ = _apply(model, strict, resolve("model", flags, **umbrellas), flags)
    return report


def restore(model: nn.Module) -> None:
    """Take every patch of a model back, `is`-identical; a model that was never patched is left alone.

    Raises:
        RestoreConflict: somebody wrapped or replaced an object of ours since; take that off first. Nothing is changed.
    """
    target = locate(model)
    state = state_of(target.model)
    if state is not None:
        _undo(target, state, list(state.applied))


@contextlib.contextmanager
def patched(model: nn.Module, **options: Any) -> Iterator[PatchReport]:
    """Apply patches for the length of a `with` block; what was applied before the block stays applied after it.

    Takes the keywords of `apply_model_patches` and yields its report.
    """
    names = ("compat", "performance", "kernels", "peft")
    defaults = {"compat": True, "performance": True, "kernels": None, "peft": True}
    umbrellas = {name: options.pop(name, defaults[name]) for name in names}
    strict = options.pop("strict", False)
    report, new = _apply(model, strict, resolve("model", options, **umbrellas), options)
    try:
        yield report
    finally:
        target = locate(model)
        state = state_of(target.model)
        if state is not None:
            _undo(target, state, [entry for entry in new if entry in state.applied])


def patch_report(model: nn.Module) -> PatchReport | None:
    """The report of the last `apply_model_patches`, with the run-time fall-backs so far; None if never patched."""
    target = locate(model)
    state = state_of(target.model)
    if state is None or state.report is None:
        return None
    return replace(state.report, fallbacks=notes.collect(target.model))


def _apply(
    model: nn.Module, strict: bool, switches: Switches, flags: dict[str, Any]
) -> tuple[PatchReport, list[Applied]]:
    if not isinstance(strict, bool):
        raise OptionTypeError(f"strict={strict!r} is a {type(strict).__name__}; it takes True or False")
    target = locate(model)
    require_weights(target)
    if switches.on("batchify"):
        require_own_forward(target)
    if not target.pretrained:
        return _not_a_transformers_model(target, switches), []
    from opake import hf

    warn_of_changes()
    family = family_of(hf.model_type(target.model), strict)
    planned = plan(target, family, hf.ModelingModule(hf.modeling_module(target.model)))
    state = open_state(target.model)
    state.options = switches.values
    rows: list[Row] = []
    new: list[Applied] = []
    try:
        for entry in planned:
            rows += _apply_one(entry, target, state, switches, new)
    except BaseException:
        _undo(target, state, new)
        raise
    rows += [_out_of_scope(name) for name in flags if "model" not in FLAGS[name].scopes]
    name = family.model_type if family else "generic"
    state.report = PatchReport(type(target.model).__name__, name, tuple(rows))
    if not state.applied:
        close_state(target.model)
    return state.report, new


def plan(target: Target, family: Any, modeling: Any) -> list[Planned]:
    """The core's own records, then the family's, in the order in which they are applied."""
    from .builtin import core_records, generic_records

    own = [Planned(record, CORE, CORE, CORE) for record in core_records(target)]
    theirs = family.plan(modeling, target.model.config) if family else []
    for entry in theirs:
        asked.require_record(entry)
    planned = own + theirs
    missing = generic_records(target, [entry.record for entry in planned])
    return planned + [Planned(record, CORE, CORE, CORE) for record in missing]


def _apply_one(entry: Planned, target: Target, state: ModelState, switches: Switches, new: list[Applied]) -> list[Row]:
    from opake.hf import Absent

    record = entry.record
    if isinstance(absent := getattr(record, "cls", None), Absent):
        return [_row(entry, "-", "skipped", absent.reason)]
    found = asked.sites(entry, target.model)
    if isinstance(found, Skip):
        return [_row(entry, "-", found.state, found.reason)]
    rows = []
    for site, module in found:
        if state.find(record, module) is not None and not record.lapsed(module):
            rows.append(_row(entry, site, "already", ""))
        elif not switches.on(record.flag):
            rows.append(_row(entry, site, "off", switches.reason(record.flag)))
        elif (skip := asked.fits(entry, module)) is not None:
            rows.append(_row(entry, site, skip.state, skip.reason))
        else:
            remark = record.remark(module)
            applied = Applied(record.kept(), site, module, asked.applied(entry, site, module))
            state.applied.append(applied)
            new.append(applied)
            rows.append(_row(entry, site, "applied", remark))
    return rows or [_row(entry, "-", "skipped", "the model has no such module")]


def _undo(target: Target, state: ModelState, entries: list[Applied]) -> None:
    clashes = conflicts([entry.undo for entry in entries])
    if clashes:
        raise RestoreConflict(
            f"{type(target.model).__name__} cannot be restored: {clashes[0]}"
            + (f" (and {len(clashes) - 1} more)" if len(clashes) > 1 else "")
            + "; somebody changed it after opake did. Take that change off first, then restore"
        )
    for entry in reversed(entries):
        entry.undo()
        state.applied.remove(entry)
    if not state.applied:
        copies.clean(target.model)
        notes.clear(target.model)
        close_state(target.model)
        if not any_live():
            from .builtin import forget_registrations

            forget_registrations()


def _not_a_transformers_model(target: Target, switches: Switches) -> PatchReport:
    name = type(target.model).__name__
    if switches.values["batchify"]:
        raise UnsupportedModel(
            f"{name} is an nn.Module but no Transformers model, so there is nothing to make vmap-safe; "
            "pass compat=False, and wrap its forward or your loss with opake.functional.with_batch_dim"
        )
    row = Row("-", CORE, "-", "-", "skipped", "no Transformers model: nothing to patch")
    return PatchReport(name, "none", (row,))


def _row(entry: Planned, site: str, state: str, reason: str) -> Row:
    return Row(str(entry.record), entry.hook, site or "(model)", entry.record.flag, state, reason, entry.source)


def _out_of_scope(flag: str) -> Row:
    return Row("-", CORE, "-", flag, "skipped", "not in this scope: apply_runtime_patches takes it")
