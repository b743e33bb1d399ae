"""Which modules a call reaches, and whether it holds tensors that cannot be lifted into its arguments.

Rematerialisation differentiates a call once more, later and at another level of nesting. A tensor that the call merely
captures would be caught at the wrong level and silently get no gradient. So every parameter and buffer of every module
that the call reaches is lifted, and a captured tensor that is being differentiated or mapped is an obstacle. The search
looks at the callable, the object it is bound to, its arguments, its closure and the globals it names itself; it does
not follow the functions that those call in turn.
"""

from __future__ import annotations

import dis
import enum
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch._C._functorch as _functorch
from torch.utils._pytree import tree_leaves

# what cannot hold a tensor of the step at hand
_INERT = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    enum.Enum,
    types.ModuleType,
    types.BuiltinFunctionType,
    torch.dtype,
    torch.device,
    torch.Size,
)


class Reach(NamedTuple):
    """The modules whose tensors a call uses, and what stands in the way of lifting all of them (None: nothing)."""

    modules: tuple[torch.nn.Module, ...]
    obstacle: str | None


def flatten_partial(fn: Callable, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Callable, tuple, dict[str, Any]]:
    """Fold the arguments of (nested) `functools.partial` objects into `args` and `kwargs`."""
    kwargs = dict(kwargs)
    while isinstance(fn, functools.partial):
        args, kwargs, fn = (*fn.args, *args), {**fn.keywords, **kwargs}, fn.func
    return fn, args, kwargs


def reach(fn: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Reach:
    """What the call `fn(*args, **kwargs)` reaches; `fn` is no `functools.partial` (see `flatten_partial`)."""
    owner = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)
    handed_in = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.nn.Module)]
    if isinstance(owner, torch.nn.Module):
        return Reach((owner, *handed_in), None)
    # the closure of a forward function that is called with its module holds decorators of all kinds
    is_forward = bool(args) and isinstance(args[0], torch.nn.Module)
    modules, obstacles = list(handed_in), []
    for held in _captured(fn, set()):
        if isinstance(held, torch.nn.Module):
            modules.append(held)
        elif isinstance(held, torch.Tensor):
            obstacles.append(f"it captures a tensor of shape {tuple(held.shape)} that is differentiated or mapped")
        elif not is_forward:
            obstacles.append(f"it captures a {type(held).__module__}.{type(held).__qualname__}, which may hold tensors")
    return Reach(tuple(modules), obstacles[0] if obstacles else None)


def _captured(value: Any, seen: set[int]) -> Iterator[Any]:
    """Modules, live tensors and objects of unknown kind that `value` holds on to."""
    if isinstance(value, _INERT) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        if _is_live(value):
            yield value
    elif isinstance(value, types.FunctionType):
        yield from _captured_by_function(value, seen)
    elif isinstance(value, functools.partial):
        yield from _captured((value.func, value.args, value.keywords), seen)
    elif isinstance(value, types.MethodType):
        yield from _captured((value.__func__, value.__self__), seen)
    elif isinstance(value, Mapping):
        for held in value.values():
            yield from _captured(held, seen)
    elif isinstance(value, (tuple, list, set, frozenset)):
        for held in value:
            yield from _captured(held, seen)
    else:
        yield value


def _captured_by_function(fn: types.FunctionType, seen: set[int]) -> Iterator[Any]:
    for cell in fn.__closure__ or ():
        # a cell is empty while its name is not bound yet
        try:
            held = cell.cell_contents
        except ValueError:
            continue
        yield from _captured(held, seen)
    yield from _captured((fn.__defaults__, fn.__kwdefaults__), seen)
    for name in _global_names(fn.__code__):
        held = fn.__globals__.get(name)
        if isinstance(held, torch.nn.Module) or (isinstance(held, torch.Tensor) and _is_live(held)):
            yield held


def _is_live(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad or _functorch.is_functorch_wrapped_tensor(tensor)


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Globals that the code, or a function defined in it, loads."""
    names = [str(step.argval) for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"]
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names.extend(_global_names(const))
    return tuple(dict.fromkeys(names))
