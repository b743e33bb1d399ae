"""The few patches that have no per-model form: named, idempotent, reported, undone by `restore_runtime`.

They change exactly the names that the report lists. Outside transforms, and for models that opake never saw, every one
of them does what the original did.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from opake.errors import RestoreConflict

from .flags import FLAGS, resolve
from .interfaces import warn_of_changes
from .report import PatchReport, Row
from .undo import Change, Undo, conflicts, put

_applied: dict[str, Undo] = {}


@dataclass(frozen=True, slots=True)
class RuntimeRecord:
    """One process-wide patch: `names` yields (owner, attribute, replacement)."""

    name: str
    flag: str
    names: Callable[[], Iterator[tuple[Any, str, Any]]]


def apply_runtime_patches(**flags: Any) -> PatchReport:
    """Apply the process-wide patches; call it once near start-up. A second call reports `already`.

    flags: every flag of the table and the umbrellas `compat`, `performance`, `kernels`, `peft`; what has no
    process-wide record is noted as `not in this scope`.

    Raises:
        UnknownOption, OptionTypeError: a bad keyword or value; nothing has changed then.
    """
    defaults: dict[str, Any] = {"compat": True, "performance": True, "kernels": None, "peft": True}
    given = dict(flags)
    umbrellas = {name: given.pop(name, default) for name, default in defaults.items()}
    switches = resolve("runtime", given, **umbrellas)
    warn_of_changes()
    rows: list[Row] = []
    for record in RECORDS:
        if record.name in _applied:
            rows += _rows(record, "already", _applied[record.name].changes)
        elif not switches.on(record.flag):
            rows.append(Row(record.name, "core", "-", record.flag, "off", switches.reason(record.flag), "core"))
        else:
            undo = Undo([put(owner, key, ours, where=_where(owner, key)) for owner, key, ours in record.names()])
            _applied[record.name] = undo
            rows += _rows(record, "applied", undo.changes)
    rows += [
        Row("-", "core", "-", name, "skipped", "not in this scope: apply_model_patches takes it", "core")
        for name in given
        if "runtime" not in FLAGS[name].scopes
    ]
    return PatchReport("the process", "runtime", tuple(rows))


def restore_runtime() -> None:
    """Take every process-wide patch back, `is`-identical; a no-op if none is applied.

    Raises:
        RestoreConflict: somebody replaced one of the names since; nothing is changed.
    """
    undos = list(_applied.values())
    if clashes := conflicts(undos):
        raise RestoreConflict(f"the runtime patches cannot be taken back: {clashes[0]}; take that change off first")
    for undo in reversed(undos):
        undo()
    _applied.clear()


def is_runtime_patched() -> bool:
    """Whether any process-wide patch is applied."""
    return bool(_applied)


def runtime_has(flag: str) -> bool:
    """Whether a process-wide patch of this flag is applied."""
    return any(record.flag == flag and record.name in _applied for record in RECORDS)


def _rows(record: RuntimeRecord, state: str, changes: list[Change]) -> list[Row]:
    return [Row(record.name, "core", change.where, record.flag, state, "", "core") for change in changes]


def _where(owner: Any, key: str) -> str:
    module = getattr(owner, "__module__", None)
    return f"{module}.{owner.__qualname__}.{key}" if isinstance(owner, type) else f"{owner.__name__}.{key}"


def _collators() -> Iterator[tuple[Any, str, Any]]:
    from opake import hf
    from opake.collate.empty import tolerant_call, tolerant_function

    for cls, key in hf.collator_names():
        yield cls, key, tolerant_call(vars(cls)[key])
    from transformers.data import data_collator

    stock = data_collator.default_data_collator
    ours = tolerant_function(stock)
    modules = ("transformers.data.data_collator", "transformers.data", "transformers.trainer", "transformers")
    for module in hf.holders(modules, "default_data_collator", stock):
        yield module, "default_data_collator", ours


def _packed_positions() -> Iterator[tuple[Any, str, Any]]:
    from opake import hf
    from opake.masks.packed import are_counted, sequence_numbers
    from opake.transforms import is_mapped

    module, name = hf.packed_position_check()
    stock = getattr(module, name)

    @functools.wraps(stock)
    def find(position_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if are_counted():
            return None
        # stock answers None after reading that each row holds one sequence; the numbers say that, too
        if is_mapped(position_ids):
            return sequence_numbers(position_ids)
        return stock(position_ids, *args, **kwargs)

    yield module, name, find


def _checkpoint() -> Iterator[tuple[Any, str, Any]]:
    import torch.utils.checkpoint
    import transformers.modeling_utils

    from opake.checkpoint.guard import guarded_checkpoint

    stock = torch.utils.checkpoint.checkpoint
    ours = guarded_checkpoint(stock)
    for module in (torch.utils.checkpoint, transformers.modeling_utils):
        if vars(module).get("checkpoint") is stock:
            yield module, "checkpoint", ours


RECORDS = (
    RuntimeRecord("EmptyBatches", "empty_batches", _collators),
    RuntimeRecord("PackedPositions", "vmap_masking", _packed_positions),
    RuntimeRecord("CheckpointGuard", "vmap_checkpointing", _checkpoint),
)
