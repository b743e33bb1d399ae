"""The patches that a model would get: put on the model without weights, which nobody will run, and taken off again."""

from __future__ import annotations

from typing import Any

from opake import hf, registry
from opake.errors import FamilyBlocked, UnknownFamily
from opake.patching import engine, state
from opake.patching.flags import Switches, resolve
from opake.patching.report import PatchReport, Row
from opake.patching.target import locate

AXIS = "every trainable parameter is consumed by an op that takes the example axis"


def rehearse(model: Any, *, cuda: bool) -> tuple[PatchReport, str, str]:
    """(report, engine, reason) that `apply_model_patches` and `engine="auto"` would give.

    cuda: as if there were a CUDA device. The model is as before afterwards.
    """
    target = locate(model)
    family = _family(hf.model_type(target.model))
    switches, rows = _switches(cuda), list[Row]()
    opened = state.open_state(target.model)
    opened.options = switches.values
    try:
        for entry in engine.plan(target, family, hf.ModelingModule(hf.modeling_module(target.model))):
            rows += engine._apply_one(entry, target, opened, switches, [])
        report = PatchReport(type(target.model).__name__, family.model_type if family else "generic", tuple(rows))
        opened.report = report
        return report, *_engine(target.model)
    finally:
        engine._undo(target, opened, list(opened.applied))


def _family(model_type: str) -> registry.Family | None:
    """None stands for the generic patches; the warning about them is for those who patch."""
    try:
        return registry.load(model_type)
    except (UnknownFamily, FamilyBlocked):
        return None


def _switches(cuda: bool) -> Switches:
    found = resolve("model", {}, compat=True, performance=True, kernels=None, peft=True)
    for flag in list(found.reasons) if cuda else ():
        # with these umbrellas a flag is off for want of a device alone
        found.values[flag] = True
        del found.reasons[flag]
    return found


def _engine(inner: Any) -> tuple[str, str]:
    """What is known of the choice without a batch."""
    if reason := state.row_independent(inner):
        return "vmap", reason
    aware = state.axis_parameters(inner)
    blind = [name for name, p in inner.named_parameters() if p.requires_grad and name not in aware]
    if blind:
        shown = blind[0] + (f" and {len(blind) - 1} more" if blind[1:] else "")
        return "vmap", f"trainable parameters are consumed by an op without an example axis: {shown}"
    return "batched", AXIS
