"""Implementation of the `Replace` record: the same forward with one global name overlaid, for one instance."""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING

from .instance import rebind, unbound
from .undo import Skip, Undo, put

if TYPE_CHECKING:
    from torch import nn

    from opake.records import Replace


def fits(record: Replace, module: nn.Module) -> Skip | None:
    if record.fn is None:
        return Skip(f"no replacement for {record.name!r} was given")
    if rebind(unbound(module, "forward"), {record.name: record.fn}) is None:
        return Skip(f"{type(module).__name__}.forward does not call {record.name!r}")
    return None


def apply(record: Replace, module: nn.Module) -> Undo:
    forward = rebind(unbound(module, "forward"), {record.name: record.fn})
    assert forward is not None, "checked by fits"
    return Undo([put(module, "forward", MethodType(forward, module))])
