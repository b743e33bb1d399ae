"""The same forward with some global names overlaid, for one instance; and how the record `Replace` is applied."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from .instance import layers, mentioned_names, read_names, rebind, unbound
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
    """Give `module` its own forward (and methods that forward calls), which see `names` in the place of globals."""
    changes = []
    for method in methods(module):
        own = rebind(unbound(module, method), dict(names))
        if own is not None:
            changes.append(put(module, method, MethodType(own, module)))
    assert changes, f"{type(module).__name__}.forward reads none of {sorted(names)}"
    return Undo(changes)


def globals_read(module: nn.Module, wanted: Callable[[Any], bool]) -> dict[str, Any]:
    """The globals, by name, that the forward of `module`, or a method that it calls, reads and that are `wanted`."""
    found: dict[str, Any] = {}
    for method in methods(module):
        for layer in layers(unbound(module, method)):
            for name in read_names(layer.__code__) & layer.__globals__.keys():
                if wanted(layer.__globals__[name]):
                    found[name] = layer.__globals__[name]
    return found


def readers(model: nn.Module, wanted: Callable[[Any], bool]) -> Iterator[tuple[str, nn.Module]]:
    """(qualified name, module) of every submodule whose forward reads a global that is `wanted`."""
    for name, module in model.named_modules():
        if globals_read(module, wanted):
            yield name, module


def methods(module: nn.Module) -> tuple[str, ...]:
    """`forward` and the methods of the class that it calls by name, written in the same modeling file."""
    return _methods(type(module))


@functools.cache
def _methods(cls: type[nn.Module]) -> tuple[str, ...]:
    read = frozenset().union(*(mentioned_names(layer.__code__) for layer in layers(cls.forward)))
    called = (name for name in sorted(read) if name != "forward" and _is_own_method(cls, name))
    return ("forward", *called)


def _is_own_method(cls: type[nn.Module], name: str) -> bool:
    found = inspect.getattr_static(cls, name, None)
    return isinstance(found, FunctionType) and found.__module__ == cls.__module__
