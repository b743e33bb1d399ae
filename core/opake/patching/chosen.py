"""Records of the caller's choice on one model, besides whatever else is applied to it, and taken back by themselves.

Same records, same state and same undo as the engine's; what differs is who chose them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from opake.registry import Planned

from .engine import _apply_one, _undo
from .flags import FLAGS, Switches
from .report import PatchReport, Row
from .state import Applied, close_state, open_state, state_of
from .target import locate, require_weights

if TYPE_CHECKING:
    from torch import nn

    from opake.records import Record


def apply_records(model: nn.Module, planned: Sequence[Planned]) -> PatchReport:
    """Apply the records, all of them or, on an error, none; their rows are added to the model's report.

    A model without a report counts as generic, so that nothing vouches for it. Returns the rows of this call.
    """
    target = locate(model)
    require_weights(target)
    state = open_state(target.model)
    everything = Switches(dict.fromkeys(FLAGS, True))
    rows: list[Row] = []
    new: list[Applied] = []
    try:
        for entry in planned:
            rows += _apply_one(entry, target, state, everything, new)
    except BaseException:
        _undo(target, state, new)
        raise
    report = PatchReport(type(target.model).__name__, "generic", tuple(rows))
    state.report = report if state.report is None else replace(state.report, rows=(*state.report.rows, *rows))
    if not state.applied:
        close_state(target.model)
    return report


def undo_records(model: nn.Module, wanted: Callable[[Record], bool], source: str) -> None:
    """Take back the applied records that are `wanted`, and the rows of the report that came from `source`.

    Raises:
        RestoreConflict: somebody changed an object of ours since; nothing is changed.
    """
    target = locate(model)
    state = state_of(target.model)
    if state is None:
        return
    _undo(target, state, [entry for entry in state.applied if wanted(entry.record)])
    if state.report is not None:
        state.report = replace(state.report, rows=tuple(row for row in state.report.rows if row.source != source))
