"""A view of an attention module for the length of one forward: the same object to its own code, but for projections.

Query, key and value are computed together when the first of them is called; other projections each by themselves.
What is not plain right now is called as the module that it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from opake.lora.layers import Projection, is_projection, read
from opake.lora.qkv import NAMES, Loose, Scope
from opake.patching.instance import hooked
from opake_kernels.lora import opake_lora_w

from .originals import OUTPUTS


class StandIn:
    """A projection in a view: called like the module, and the module in everything else."""

    def __init__(self, member: nn.Module, scope: Scope | None) -> None:
        self._member, self._scope = member, scope

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # hooks of the layer, and whatever else a call of the module runs, are its own business
        if args or kwargs or hooked(self._member):
            return self._member(x, *args, **kwargs)
        if self._scope is not None and (y := self._scope.output(self._member, x)) is not None:
            return y
        found = read(self._member, x)
        if isinstance(found, Projection) and found.adapter is not None:
            return opake_lora_w(x, found.W, found.A, found.B, found.scaling, found.bias)
        return self._member(x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._member, name)


def view_of(module: nn.Module, parts: tuple[str, ...]) -> nn.Module:
    """A shallow copy of the module with stand-ins for its projections; `parts`: `qkv`, `o` or both."""
    view: nn.Module = object.__new__(type(module))
    vars(view).update(vars(module))
    members: dict[str, Any] = dict(module._modules)
    scope = _scope(module) if "qkv" in parts else None
    for name, member in module._modules.items():
        part = "o" if name in OUTPUTS else "qkv"
        shared = scope if name in NAMES else None
        if part in parts and member is not None and (shared is not None or is_projection(member)):
            members[name] = StandIn(member, shared)
    vars(view)["_modules"] = members
    return view


def carry_back(view: nn.Module, module: nn.Module) -> None:
    """What the forward set on the view is set on the module."""
    own = vars(module)
    for name, value in vars(view).items():
        if name != "_modules" and own.get(name, view) is not value:
            own[name] = value


def _scope(module: nn.Module) -> Scope | None:
    """One computation for query, key and value; None where they are not three layers that may be computed together."""
    members = tuple(module._modules.get(name) for name in NAMES)
    if any(member is None or hooked(member) for member in members):
        return None
    return Scope(Loose(members))  # type: ignore[arg-type]
