"""The same forward with some global names overlaid, for one instance; and how the record `Replace` is applied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any

from .instance import layers, read_names, rebind, unbound
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
    return overlay(module, {record.name: record.fn})


def overlay(module: nn.Module, names: Mapping[str, Any]) -> Undo:
    """Give `module` its own forward, which sees `names` in the place of its module's globals."""
    forward = rebind(unbound(module, "forward"), dict(names))
    assert forward is not None, f"{type(module).__name__}.forward reads none of {sorted(names)}"
    return Undo([put(module, "forward", MethodType(forward, module))])


def globals_read(module: nn.Module, wanted: Callable[[Any], bool]) -> dict[str, Any]:
    """The globals, by name, that the forward of `module` reads (through its decorators) and that are `wanted`."""
    found: dict[str, Any] = {}
    for layer in layers(unbound(module, "forward")):
        for name in read_names(layer.__code__) & layer.__globals__.keys():
            if wanted(layer.__globals__[name]):
                found[name] = layer.__globals__[name]
    return found


def readers(model: nn.Module, wanted: Callable[[Any], bool]) -> Iterator[tuple[str, nn.Module]]:
    """(qualified name, module) of every submodule whose forward reads a global that is `wanted`."""
    for name, module in model.named_modules():
        if globals_read(module, wanted):
            yield name, module
