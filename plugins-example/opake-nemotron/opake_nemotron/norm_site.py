"""`LayerNorm` in place: what the class computes, found by running it, and the fused op on the instance."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from opake.patching.instance import untouched, wrap_method
from opake.records import Skip, Undo

from .layer_norm import layer_norm_reference, opake_layer_norm

EPSILONS = ("eps", "variance_epsilon")


class Variant(NamedTuple):
    """The attribute that holds epsilon, and what is added to the weight."""

    epsilon: str
    offset: float


_variants: weakref.WeakKeyDictionary[type, Variant | None] = weakref.WeakKeyDictionary()


def fits(module: nn.Module) -> Skip | None:
    name = type(module).__name__
    if not untouched(module, "forward"):
        return Skip(f"the forward of this {name} was replaced, and the replacement is kept", "stock")
    if not _has_weights(module):
        return Skip(f"this {name} has no weight of one dimension; it stays as it is", "stock")
    return None if variant_of(module) else Skip(f"{name} computes something else than LayerNorm")


def apply(module: nn.Module) -> Undo:
    variant = variant_of(module)
    assert variant is not None, "checked by fits"
    return Undo([wrap_method(module, "forward", partial(_forward, variant))])


def variant_of(module: nn.Module) -> Variant | None:
    """The variant of the module's class, asked once a class."""
    if type(module) not in _variants:
        _variants[type(module)] = _find(module)
    return _variants[type(module)]


def _forward(variant: Variant, inner: Callable[..., Any], self: Any, x: torch.Tensor) -> torch.Tensor:
    # the class rounds its input under autocast, which is left to it
    if torch.is_autocast_enabled(x.device.type):
        return inner(self, x)
    bias = getattr(self, "bias", None)
    return opake_layer_norm(x, self.weight, bias, getattr(self, variant.epsilon), offset=variant.offset)


def _has_weights(module: Any) -> bool:
    return isinstance(getattr(module, "weight", None), torch.Tensor) and module.weight.dim() == 1


def _find(module: nn.Module) -> Variant | None:
    epsilon = next((name for name in EPSILONS if isinstance(getattr(module, name, None), float)), None)
    if epsilon is None:
        return None
    double: Any = copy.deepcopy(module).cpu().float()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, len(double.weight), generator=generator)
    with torch.no_grad():
        for parameter in double.parameters():
            parameter.normal_(generator=generator)
        found = type(double).forward(double, x)
        for offset in (0.0, 1.0):
            wanted = layer_norm_reference(
                x, double.weight, getattr(double, "bias", None), getattr(double, epsilon), offset
            )
            if torch.allclose(found, wanted, rtol=1e-5, atol=1e-5):
                return Variant(epsilon, offset)
    return None
