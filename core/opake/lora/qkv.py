"""`FuseQKV`: the three projections of an attention module in one call, the attention's own forward unchanged.

The forward of the attention opens a scope. The first of its projections to be called in it computes all three, and the
others hand over what waits for them if they are called on the same input. Norms, rotary embedding, cache, dispatch and
whatever else the forward does with the projections stay the family's. Outside the scope, or where the three are not
plain, each projection is on its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from opake.patching.instance import untouched, wrap_method
from opake.patching.notes import note
from opake.patching.undo import Skip, Undo, put
from opake_kernels.lora import opake_lora_qkv

from .layers import Projection, is_projection, parameters_of, read

if TYPE_CHECKING:
    from opake.records import FuseQKV

NAMES = ("q_proj", "k_proj", "v_proj")
# the projections as they were patched, kept on the attention module
_KEY = "_opake_qkv"
_open = threading.local()


class Scope:
    """One forward of one attention module: the input of its projections and the outputs that wait for them."""

    __slots__ = ("outputs", "owner", "x")

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.x: torch.Tensor | None = None
        self.outputs: dict[int, torch.Tensor] = {}

    def output(self, member: Any, x: torch.Tensor) -> torch.Tensor | None:
        """What waits for `member` on input `x`; None if it has to compute that itself."""
        if self.x is None and any(member is one for one in vars(self.owner)[_KEY]):
            self.x, self.outputs = x, self._compute(x)
        return self.outputs.pop(id(member), None) if x is self.x else None

    def _compute(self, x: torch.Tensor) -> dict[int, torch.Tensor]:
        found = plan(self.owner, x)
        if isinstance(found, str):
            note(self.owner, found)
            return {}
        arguments = [value for p in found for value in (p.W, p.A, p.B, p.scaling)]
        outputs = opake_lora_qkv(x, *arguments, *(p.bias for p in found))  # type: ignore[arg-type]
        return {id(member): y for member, y in zip(vars(self.owner)[_KEY], outputs, strict=True)}


def plan(owner: Any, x: torch.Tensor | None = None) -> list[Projection] | str:
    """The three projections of an attention module, or why they are not computed together."""
    found = []
    for name, member in zip(NAMES, vars(owner)[_KEY], strict=True):
        if owner._modules.get(name) is not member:
            return f"{name} was replaced after patching"
        if member._forward_pre_hooks:
            # it may give this projection another input, or write into the one that all share
            return f"there is a hook in front of {name}"
        projection = read(member, x)
        if isinstance(projection, str):
            return f"{name}: {projection}"
        found.append(projection)
    return found if any(p.adapter for p in found) else "no adapter is active"


def fits(record: FuseQKV, module: nn.Module) -> Skip | None:
    members = {name: module._modules.get(name) for name in NAMES}
    missing = [name for name, member in members.items() if member is None]
    if missing:
        return Skip(f"{type(module).__name__} has no {', '.join(missing)}")
    if not any(is_projection(member) for member in members.values()):
        return Skip(f"no LoRA adapter on {', '.join(NAMES)}")
    for name, member in members.items():
        if not is_projection(member) and type(member) is not nn.Linear:
            return Skip(f"{name} is a {type(member).__name__}", "stock")
        if not untouched(member, "forward"):
            return Skip(f"the forward of {name} was replaced by somebody else")
    return None


def apply(record: FuseQKV, module: nn.Module) -> Undo:
    members = tuple(module._modules[name] for name in NAMES)
    changes = [put(module, _KEY, members), wrap_method(module, "forward", scoped)]
    return Undo(changes + [wrap_method(member, "forward", _projected) for member in members])


def axis_parameters(record: FuseQKV, module: nn.Module) -> frozenset[str]:
    found = plan(module)
    if isinstance(found, str):
        return frozenset()
    names = frozenset[str]().union(*(parameters_of(p, f"{n}.") for n, p in zip(NAMES, found, strict=True)))
    return names & frozenset(name for name, _ in module.named_parameters())


def is_fused(module: nn.Module) -> bool:
    """Whether the record is applied to this attention module."""
    return _KEY in vars(module)


class Loose:
    """Stands for an attention module in a `Scope`, where nothing is to be kept on the module itself."""

    def __init__(self, members: tuple[nn.Module, ...]) -> None:
        self._modules = dict(zip(NAMES, members, strict=True))
        vars(self)[_KEY] = members


def scoped(inner: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return inner(self, *args, **kwargs)
    before = getattr(_open, "scope", None)
    _open.scope = Scope(self)
    try:
        return inner(self, *args, **kwargs)
    finally:
        _open.scope = before


def _projected(inner: Callable[..., Any], self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not args and not kwargs and not torch.compiler.is_compiling():
        scope = getattr(_open, "scope", None)
        y = None if scope is None else scope.output(self, x)
        if y is not None:
            return y
    return inner(self, x, *args, **kwargs)
