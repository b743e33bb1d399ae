"""Which gated activation a module of stacked experts computes, found by its numbers.

Transformers keeps the gate in the method `_apply_gate` of the experts, on the output of the joint projection: halves as
two blocks or alternating, clamped or not, with an offset. It is run on a few numbers and compared with the gates that
the op knows. Leaves out gates with parameters of their own: their experts stay with Transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from opake.rows.probe import interfered, numbers
from opake_kernels.activations import ACTIVATIONS, Activation
from opake_kernels.gated import gated_reference


class Gate(NamedTuple):
    """activation, and whether the rows of gate and up alternate in the joint projection."""

    activation: Activation
    paired: bool


def gate_of(experts: Any) -> Gate | None:
    """The gate that equals the module's own on a few numbers in float64, or None."""
    limit = _number(experts, "limit")
    if interfered(getattr(experts, "act_fn", None)):
        return None
    # far enough that a clamp would show
    x = numbers(64, 12, dtype=torch.float64) * max(4.0, limit)
    try:
        with torch.no_grad():
            found = experts._apply_gate(x)
    except Exception:  # a gate that takes no plain tensor is not one of ours
        return None
    for candidate in _candidates(experts, limit):
        ours = gated_reference(x, None, candidate.activation, candidate.paired)
        if ours.shape == found.shape and torch.allclose(ours, found, rtol=1e-12, atol=1e-12):
            return candidate
    return None


def form(experts: Any) -> tuple[Any, ...]:
    """What tells one gate from another without running it, for a look at every call."""
    function = getattr(experts, "act_fn", None)
    kind = type(function) if isinstance(function, nn.Module) else function
    own = vars(experts).get("_apply_gate")
    constants = getattr(function, "approximate", None), _number(experts, "limit"), _number(experts, "alpha")
    return kind, own, interfered(function), *constants


def _candidates(experts: Any, limit: float) -> Iterator[Gate]:
    kinds = dict.fromkeys(act for act in ACTIVATIONS.values() if not act.limit and not act.offset)
    alpha = _number(experts, "alpha")
    for paired in (False, True):
        for act in kinds:
            yield Gate(act, paired)
            if limit:
                yield Gate(Activation(act.kind, alpha=act.alpha, limit=limit), paired)
        if limit and alpha:
            yield Gate(Activation("silu", alpha=alpha, limit=limit, offset=1.0), paired)


def _number(experts: Any, name: str) -> float:
    value = getattr(experts, name, None)
    return float(value) if isinstance(value, int | float) else 0.0
