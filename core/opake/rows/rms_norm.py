"""`RMSNorm` in place: which variant a class computes, found by its numbers, and the fused op on the instance."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn

from opake.checkpoint.norms import offer
from opake.patching.instance import untouched, wrap_method
from opake.patching.undo import Skip, Undo
from opake_kernels.add_rms_norm import opake_fused_add_rms_norm
from opake_kernels.rms_norm import opake_rms_norm, rms_norm_reference

from .lazy_sum import Sum
from .probe import numbers, remembered, stand_in

if TYPE_CHECKING:
    from opake.records import RMSNorm

EPSILONS = ("variance_epsilon", "eps", "epsilon")


class Variant(NamedTuple):
    """Where the epsilon is kept, what is added to the weight, and whether the cast comes before or after it."""

    epsilon: str
    offset: float
    cast: Literal["before", "after"]


FORMS: tuple[tuple[float, Literal["before", "after"]], ...] = ((0.0, "before"), (0.0, "after"), (1.0, "after"))
_variants: weakref.WeakKeyDictionary[type, Variant | None] = weakref.WeakKeyDictionary()


def variant_of(module: nn.Module) -> Variant | None:
    """The variant that the module's class computes, or None if it is no RMSNorm that the op knows."""
    return remembered(_variants, type(module), lambda: _find(module))


def fits(record: RMSNorm, module: nn.Module) -> Skip | None:
    if not untouched(module, "forward"):
        return Skip(f"the forward of this {type(module).__name__} was replaced, and the replacement is kept", "stock")
    if variant_of(module) is None:
        return Skip(f"{type(module).__name__} computes something else than the RMSNorm variants of the op")
    return None


def apply(record: RMSNorm, module: nn.Module) -> Undo:
    variant = variant_of(module)
    assert variant is not None, "checked by fits"
    return Undo([wrap_method(module, "forward", functools.partial(_forward, variant))])


def axis_parameters(record: RMSNorm, module: nn.Module) -> frozenset[str]:
    return frozenset({"weight"} & set(dict(module.named_parameters(recurse=False))))


def _forward(variant: Variant, inner: Callable[..., Any], self: Any, hidden_states: Any) -> torch.Tensor:
    weight, eps = getattr(self, "weight", None), getattr(self, variant.epsilon)
    if isinstance(hidden_states, Sum) and weight is not None:
        normed, total = opake_fused_add_rms_norm(
            hidden_states.addend, hidden_states.residual, weight, eps, offset=variant.offset, cast=variant.cast
        )
        hidden_states.settle(total)
        return offer(normed, opake_rms_norm, total, weight, eps, offset=variant.offset, cast=variant.cast)
    x = hidden_states.tensor() if isinstance(hidden_states, Sum) else hidden_states
    normed = opake_rms_norm(x, weight, eps, offset=variant.offset, cast=variant.cast)
    return offer(normed, opake_rms_norm, x, weight, eps, offset=variant.offset, cast=variant.cast)


def _find(module: nn.Module) -> Variant | None:
    epsilon = next((name for name in EPSILONS if isinstance(vars(module).get(name), float)), None)
    if epsilon is None:
        return None
    weighted = isinstance(getattr(module, "weight", None), torch.Tensor)
    x = numbers(4, 256, dtype=torch.bfloat16)
    weight = numbers(256, dtype=torch.bfloat16, seed=1) if weighted else None
    double = stand_in(module, **({"weight": nn.Parameter(weight)} if weight is not None else {}))
    try:
        with torch.no_grad():
            found = double(x)
    except Exception:  # a class of another form may fail in any way; then it is no RMSNorm
        return None
    for offset, cast in FORMS:
        expected = rms_norm_reference(x, weight, getattr(module, epsilon), offset=offset, cast=cast)
        if torch.equal(found, expected):
            return Variant(epsilon, offset, cast)
    return None
