"""`FuseMLP`: a gated MLP with LoRA in one call, gate and up as two projections or as one combined."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from opake.patching.instance import called_around, untouched, wrap_method
from opake.patching.notes import note
from opake.patching.undo import Skip, Undo, put
from opake.rows import gated_mlp
from opake_kernels.activations import Activation
from opake_kernels.lora import opake_lora_mlp
from opake_kernels.tracked import trained

from .layers import Projection, is_projection, parameters_of, read

if TYPE_CHECKING:
    from opake.records import FuseMLP

# the activation function as it was recognised, kept on the module
_KEY = "_opake_activation"
# set on a module whose gate and up are to be computed again in the backward
REMATERIALISE = "_opake_rematerialise"


def fits(record: FuseMLP, module: nn.Module) -> Skip | None:
    names = gated_mlp.projections(module)
    if names is not None and not any(is_projection(module._modules[name]) for name in names):
        return Skip(f"no LoRA adapter on {', '.join(names)}")
    if (skip := gated_mlp.fits(record, module)) is not None:  # type: ignore[arg-type]
        return skip
    assert names is not None, "asked by gated_mlp.fits"
    for name in names:
        member = module._modules[name]
        if not is_projection(member) and type(member) is not nn.Linear:
            return Skip(f"{name} is a {type(member).__name__}", "stock")
    return None if untouched(module, "forward") else Skip("its forward was replaced by somebody else")


def apply(record: FuseMLP, module: nn.Module) -> Undo:
    activation = gated_mlp.activation_of(module)
    assert activation is not None, "checked by fits"
    function = _function(module)
    kept = put(module, _KEY, (function, gated_mlp.form(function)))
    return Undo([kept, wrap_method(module, "forward", functools.partial(_forward, activation))])


def rematerialises(module: nn.Module, x: torch.Tensor) -> bool:
    """Whether the fused call does by itself what `REMATERIALISE` asks for, now and for this input."""
    if _KEY not in vars(module) or torch.compiler.is_compiling():
        return False
    found = plan(module, x)
    return not isinstance(found, str) and _frozen(found)


def _frozen(found: dict[str, Projection]) -> bool:
    return not any(trained(p.W) for p in found.values())


def axis_parameters(record: FuseMLP, module: nn.Module) -> frozenset[str]:
    found = plan(module)
    if isinstance(found, str):
        return frozenset()
    names = frozenset[str]().union(*(parameters_of(p, f"{name}.") for name, p in found.items()))
    return names & frozenset(name for name, _ in module.named_parameters())


def plan(module: Any, x: torch.Tensor | None = None) -> dict[str, Projection] | str:
    """The two or three projections of an MLP by name, or why they are not computed together."""
    names = gated_mlp.projections(module)
    function = _function(module)
    patched, known = vars(module)[_KEY]
    if names is None or function is not patched:
        return "the module was changed after patching"
    if gated_mlp.changed(function, known):
        return "the activation was changed or hooked after patching"
    found: dict[str, Projection] = {}
    for name in names:
        member = module._modules[name]
        projection = read(member, x if name != names[-1] else None)
        if isinstance(projection, str):
            return f"{name}: {projection}"
        if projection.bias is not None:
            return f"{name} has a bias"
        if called_around(member) or not untouched(member, "forward"):
            return f"there is a hook on {name}"
        found[name] = projection
    return found if any(p.adapter for p in found.values()) else "no adapter is active"


def _function(module: nn.Module) -> Any:
    name = gated_mlp.function_name(module)
    return None if name is None else getattr(module, name)


def _forward(
    activation: Activation, inner: Callable[..., Any], self: Any, x: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    if args or kwargs or torch.compiler.is_compiling():
        return inner(self, x, *args, **kwargs)
    found = plan(self, x)
    if isinstance(found, str):
        note(self, found)
        return inner(self, x)
    arguments: list[Any] = [value for p in _separate(list(found.values())) for value in (p.W, p.A, p.B, p.scaling)]
    again = vars(self).get(REMATERIALISE, False) and _frozen(found)
    return opake_lora_mlp(x, *arguments, activation, rematerialise=again)  # pyright: ignore[reportCallIssue]


def _separate(found: list[Projection]) -> list[Projection]:
    """Gate, up and down; a combined projection is two that share A."""
    if len(found) == 3:
        return found
    both, down = found
    half = both.W.shape[0] // 2
    halves = (slice(None, half), slice(half, None))
    return [
        *(both._replace(W=both.W[part], B=None if both.B is None else both.B[..., part]) for part in halves),
        down,
    ]
