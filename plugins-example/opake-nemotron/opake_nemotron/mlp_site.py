"""`PlainMLP` in place: the projections are called as modules, so adapters and hooks on them go on working."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from opake.patches.kernels import opake_relu_squared
from opake.patching.instance import untouched, wrap_method
from opake.records import Skip, Undo


def fits(module: nn.Module) -> Skip | None:
    name = type(module).__name__
    if not untouched(module, "forward"):
        return Skip(f"the forward of this {name} was replaced, and the replacement is kept", "stock")
    if not all(isinstance(getattr(module, part, None), nn.Module) for part in ("up_proj", "down_proj")):
        return Skip(f"{name} has no up_proj and down_proj")
    if not _squares_relu(module):
        return Skip(f"the activation of {name} is not relu squared; it stays as it is", "stock")
    return None


def apply(module: nn.Module) -> Undo:
    return Undo([wrap_method(module, "forward", _forward)])


def _forward(inner: Callable[..., Any], self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(opake_relu_squared(self.up_proj(x)))


def _squares_relu(module: Any) -> bool:
    """By its numbers: `hidden_act` may name another activation, and users may put one in its place."""
    x = torch.linspace(-3, 3, 13, dtype=torch.float64)
    with torch.no_grad():
        return torch.equal(module.act_fn(x), x.relu().square())
