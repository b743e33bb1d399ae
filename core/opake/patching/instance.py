"""Put a function in the place of one instance's method; the class, its module and other instances stay as they are.

The new method is a bound method whose function closes over the unbound original only, never over the module: so a deep
copy of the module is bound to the copy. Signature, name and documentation stay those of the original.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from .undo import Change, put

Method = Callable[..., Any]


def unbound(owner: object, name: str) -> Method:
    """The function behind `owner.name`, to be called with the owner first, whatever is installed there now."""
    own = vars(owner).get(name)
    if own is None:
        return getattr(type(owner), name)
    if isinstance(own, MethodType) and own.__self__ is owner:
        return own.__func__
    return _taking_owner(own)


def _taking_owner(bound: Method) -> Method:
    """A function that takes the owner first and passes it over: what was installed is bound to something already."""

    def call(_owner: object, *args: Any, **kwargs: Any) -> Any:
        return bound(*args, **kwargs)

    call.__name__ = getattr(bound, "__name__", "call")
    try:
        signature = inspect.signature(bound)
    except ValueError:  # a builtin, such as torch.relu
        return call
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    rest = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.POSITIONAL_ONLY]
    call.__signature__ = signature.replace(parameters=[first, *rest])  # type: ignore[attr-defined]
    return call


def wrap_method(owner: object, name: str, around: Method, where: str | None = None) -> Change:
    """Install `around(inner, self, *args, **kwargs)` as `owner.name`; `inner` is the unbound original."""
    inner = unbound(owner, name)

    def method(self: object, *args: Any, **kwargs: Any) -> Any:
        return around(inner, self, *args, **kwargs)

    functools.update_wrapper(method, inner)
    return put(owner, name, MethodType(method, owner), where=where)


# the code of every method that `wrap_method` installs
_METHOD = next(const for const in wrap_method.__code__.co_consts if isinstance(const, CodeType))


# an attribute of every function that `rebind` makes
_REBOUND = "_opake_rebound"


def is_ours(fn: object) -> bool:
    """Whether `wrap_method` or `rebind` made this function."""
    return getattr(fn, "__code__", None) is _METHOD or _REBOUND in getattr(fn, "__dict__", ())


def hooked(module: Any) -> bool:
    """Whether calling `module` runs anything besides the forward of its class: hooks, or a forward of its own."""
    return "forward" in vars(module) or called_around(module)


def called_around(module: Any) -> bool:
    """Whether hooks run when `module` is called."""
    own = vars(module)
    return bool(
        own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    )


def untouched(owner: object, name: str) -> bool:
    """Whether `owner.name` is that of its class, at most under methods of ours: nobody else put one in its place."""
    own = vars(owner).get(name)
    if own is None:
        return True
    fn = getattr(own, "__func__", None) if getattr(own, "__self__", None) is owner else None
    while fn is not None and fn.__code__ is _METHOD:
        fn = fn.__wrapped__
    return fn is getattr(type(owner), name)


def rebind(fn: object, names: dict[str, Any], busy: tuple[FunctionType, ...] = ()) -> FunctionType | None:
    """A copy of `fn` that sees `names` instead of the module globals of those names; None if no layer of it uses any.

    Decorators are looked through by their closures. A wrapper that closes over itself keeps its original self-cell,
    because it compares that cell with the function of its class.
    """
    if not isinstance(fn, FunctionType) or fn in busy:
        return None
    hit = set(names) & read_names(fn.__code__)
    cells, changed = [], bool(hit)
    for cell in fn.__closure__ or ():
        inner = _rebound_cell(cell, names, (*busy, fn))
        changed = changed or inner is not cell
        cells.append(inner)
    if not changed:
        return None
    scope = _overlaid(fn.__globals__, {name: names[name] for name in hit}) if hit else fn.__globals__
    # torch.compile keeps what it made with the code object, and calls it by a name in the globals that it saw
    code = fn.__code__.replace() if hit else fn.__code__
    new = FunctionType(code, scope, fn.__name__, fn.__defaults__, tuple(cells) if fn.__closure__ else None)
    new.__kwdefaults__ = fn.__kwdefaults__
    new.__qualname__, new.__module__, new.__doc__ = fn.__qualname__, fn.__module__, fn.__doc__
    new.__dict__.update({key: value for key, value in vars(fn).items() if key != "__wrapped__"})
    setattr(new, _REBOUND, True)
    if hasattr(fn, "__wrapped__"):
        new.__signature__ = inspect.signature(fn)  # type: ignore[attr-defined]
    return new


def _overlaid(scope: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    """The globals with other values for some names, and without the name of their module.

    torch.compile looks a global up in the module that the mapping names, where it would find the original.
    """
    return {key: value for key, value in {**scope, **names}.items() if key != "__name__"}


def layers(fn: object, busy: tuple[FunctionType, ...] = ()) -> Iterator[FunctionType]:
    """`fn` and the functions that its decorators close over."""
    if not isinstance(fn, FunctionType) or fn in busy:
        return
    yield fn
    for cell in fn.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:
            continue
        yield from layers(held, (*busy, fn))


@functools.lru_cache(maxsize=4096)
def read_names(code: CodeType) -> frozenset[str]:
    """Names of the globals that a code object reads, in its lambdas and comprehensions too."""
    own = (each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return frozenset(own).union(*map(read_names, _inner(code)))


def mentioned_names(code: CodeType) -> frozenset[str]:
    """Names of globals and attributes that a code object mentions, in its lambdas and comprehensions too."""
    return frozenset(code.co_names).union(*map(mentioned_names, _inner(code)))


def _inner(code: CodeType) -> list[CodeType]:
    return [const for const in code.co_consts if isinstance(const, CodeType)]


def _rebound_cell(cell: Any, names: dict[str, Any], busy: tuple[FunctionType, ...]) -> Any:
    try:
        held = cell.cell_contents
    except ValueError:
        return cell
    new = rebind(held, names, busy)
    return cell if new is None else type(cell)(new)
