"""What the records of a plugin are, and answer, checked: its mistakes carry the record and the line of source.

A name that the installed libraries lack costs the one record that needs it. Anything else that a plugin's record does
wrong is an error, raised before a model is changed where that can be known. The core's own records are trusted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opake.errors import FamilyInvalid, OpakeError, PatchError
from opake.registry import Planned

from .flags import FLAGS
from .undo import Skip, Undo

if TYPE_CHECKING:
    from torch import nn

CORE = "core"


def require_record(entry: Planned) -> None:
    """Raises FamilyInvalid where an entry is no Record, has no flag of a model, or names a class by no class."""
    from opake.hf import Absent, ModelingModule
    from opake.records import ClassRecord, Record, Rotary

    record = entry.record
    if not isinstance(record, Record):
        raise _invalid(entry, "is no opake.records.Record; subclass Record or ClassRecord")
    if record.flag not in FLAGS or "model" not in FLAGS[record.flag].scopes:
        known = ", ".join(name for name, flag in FLAGS.items() if "model" in flag.scopes)
        raise _invalid(entry, f"has the flag {record.flag!r}; the flags of a model are {known}")
    cls = getattr(record, "cls", None)
    if isinstance(record, Rotary):
        if not isinstance(cls, ModelingModule | Absent):
            raise _invalid(entry, f"was given {cls!r}; write Rotary(hf)")
    elif isinstance(record, ClassRecord) and not isinstance(cls, type | Absent):
        raise _invalid(entry, f"was given {cls!r}, no class; write {type(record).__name__}(hf.NameOfTheClass)")


def sites(entry: Planned, model: nn.Module) -> list[tuple[str, nn.Module]] | Skip:
    """The sites of a record, or why it has none here."""
    from torch.nn import Module

    try:
        found = list(entry.record.sites(model))
    except Exception as error:
        return Skip(_missing(entry, "sites", error))
    for site in found:
        if not (isinstance(site, tuple) and len(site) == 2 and isinstance(site[1], Module)):
            raise _invalid(entry, f"has a {type(site).__name__} among its sites, no pair of a name and a module")
    return found


def fits(entry: Planned, module: nn.Module) -> Skip | None:
    """None if the record can be applied to the module, else why not."""
    try:
        answer = entry.record.fits(module)
    except Exception as error:
        return Skip(_missing(entry, "fits", error))
    if answer is not None and not isinstance(answer, Skip):
        raise _invalid(entry, f"answers fits with {answer!r}, not None or a Skip")
    return answer


def applied(entry: Planned, site: str, module: nn.Module) -> Undo:
    """Apply the record. An error in it is handed on with the record's name: the model may have been changed."""
    try:
        undo = entry.record.apply(module)
    except Exception as error:
        error.add_note(f"while {entry.record} ({entry.source}) was applied to {site or 'the model'}")
        raise
    if not isinstance(undo, Undo):
        raise _invalid(entry, f"returned {undo!r} from apply, no Undo, so {site or 'the model'} cannot be restored")
    return undo


def _missing(entry: Planned, method: str, error: Exception) -> str:
    """The reason for a skip; of the core's own records, that without them numbers could be wrong is an error."""
    if isinstance(error, OpakeError):
        raise error
    absent = isinstance(error, ImportError | AttributeError)
    if entry.hook != CORE:
        if absent:
            return f"{type(error).__name__}: {error}"
        raise _invalid(entry, f"raised {type(error).__name__} in {method}: {error}") from error
    if not absent:
        raise error
    raise PatchError(
        f"{entry.record} does not fit the installed libraries: {type(error).__name__}: {error}; run `opake doctor`, and"
        f" use versions inside the tested range, or leave it out with {entry.record.flag}=False"
    ) from error


def _invalid(entry: Planned, what: Any) -> FamilyInvalid:
    return FamilyInvalid(f"{entry.record} ({entry.source}) {what}")
