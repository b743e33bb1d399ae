"""`GatedMLP` in place: the two projections and the down projection as they are, one kernel between them.

The activation is read from the module by its numbers, so `config.hidden_act` and user-made changes are honoured; one
that the kernels do not have stays with Transformers, and the report says so. Projections are called as modules: hooks
and adapters on them keep working.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from opake.patching.instance import untouched, wrap_method
from opake.patching.notes import note
from opake.patching.undo import Skip, Undo
from opake_kernels.activations import ACTIVATIONS, Activation
from opake_kernels.gated import opake_gated_activation

from .probe import interfered, numbers, remembered, stand_in

if TYPE_CHECKING:
    from opake.records import GatedMLP

SEPARATE, COMBINED = ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj")
FUNCTIONS = ("act_fn", "activation_fn")
_acts_alike: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def fits(record: GatedMLP, module: nn.Module) -> Skip | None:
    if not untouched(module, "forward"):
        return Skip(f"the forward of this {type(module).__name__} was replaced, and the replacement is kept", "stock")
    name = function_name(module)
    if name is None or projections(module) is None:
        return Skip(f"{type(module).__name__} is no gated MLP with {', '.join(SEPARATE)} or {', '.join(COMBINED)}")
    if activation_of(module) is None:
        return Skip(
            f"activation {type(getattr(module, name)).__name__} has no fused kernel; it stays as it is", "stock"
        )
    if not remembered(_acts_alike, type(module), lambda: _computes_a_gated_mlp(module)):
        return Skip(f"{type(module).__name__} computes something else than down(act(gate) * up)")
    return None


def apply(record: GatedMLP, module: nn.Module) -> Undo:
    activation = activation_of(module)
    assert activation is not None, "checked by fits"
    known = form(getattr(module, function_name(module) or ""))
    return Undo([wrap_method(module, "forward", functools.partial(_forward, activation, known))])


def activation_of(module: nn.Module) -> Activation | None:
    """The fused activation that equals the module's own on a few numbers, in float64."""
    name = function_name(module)
    if name is None:
        return None
    x = numbers(64, dtype=torch.float64) * 4
    try:
        with torch.no_grad():
            found = getattr(module, name)(x)
    except Exception:  # an activation that takes no plain tensor is not one of ours
        return None
    for candidate in dict.fromkeys(ACTIVATIONS.values()):
        plain = not candidate.limit and not candidate.offset
        if plain and torch.allclose(candidate.reference(x, None), found, rtol=1e-12, atol=1e-12):
            return candidate
    return None


def form(function: Any) -> tuple[Any, ...]:
    """What tells one activation from another without running it, for a look at every forward."""
    kind = type(function) if isinstance(function, nn.Module) else function
    return kind, getattr(function, "approximate", None)


def changed(function: Any, known: tuple[Any, ...]) -> bool:
    """Whether the activation was swapped, wrapped or hooked since it was recognised."""
    return form(function) != known or interfered(function)


def _forward(
    activation: Activation, known: tuple[Any, ...], inner: Callable[..., Any], self: Any, x: torch.Tensor
) -> torch.Tensor:
    function = next(getattr(self, name) for name in FUNCTIONS if hasattr(self, name))
    if changed(function, known):
        note(self, "the activation was changed or hooked after patching: the stock forward runs")
        return inner(self, x)
    if "gate_up_proj" in self._modules:
        return self.down_proj(opake_gated_activation(self.gate_up_proj(x), activation=activation))
    return self.down_proj(opake_gated_activation(self.gate_proj(x), self.up_proj(x), activation=activation))


def function_name(module: nn.Module) -> str | None:
    return next((name for name in FUNCTIONS if hasattr(module, name)), None)


def projections(module: nn.Module) -> tuple[str, ...] | None:
    for names in (SEPARATE, COMBINED):
        if all(name in module._modules for name in names):
            return names
    return None


def _computes_a_gated_mlp(module: nn.Module) -> bool:
    """Run the class on a small stand-in and compare with ours."""
    names, function = projections(module), function_name(module)
    assert names is not None
    assert function is not None
    wide = 12 if names is COMBINED else 6
    layers = {name: nn.Linear(4, wide, bias=False) for name in names[:-1]} | {names[-1]: nn.Linear(6, 4, bias=False)}
    for seed, layer in enumerate(layers.values()):
        layer.weight = nn.Parameter(numbers(*layer.weight.shape, seed=seed))
    double = stand_in(module, **layers, **{function: getattr(module, function)})
    activation, x = activation_of(module), numbers(3, 4, seed=9)
    assert activation is not None
    try:
        with torch.no_grad():
            ours = _forward(activation, form(getattr(module, function)), type(double).forward, double, x)
            return torch.allclose(double(x), ours, rtol=1e-5, atol=1e-5)
    except Exception:  # a class that wants other arguments computes something else
        return False
