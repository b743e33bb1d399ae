"""The gated activation of a fused MLP where the low-rank terms are already in gate and up: any device, dtype and rank.

Kernels where they can serve, else torch, with the derivative written out so that nothing but its results is kept.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from opake_kernels.activations import Activation
from opake_kernels.gated import opake_gated_activation
from opake_kernels.gated_kernels import gated_backward
from opake_kernels.launch import uses_triton

__all__ = ["activated", "activated_backward", "slope_times"]


def activated(gate: torch.Tensor, up: torch.Tensor, act: Activation) -> torch.Tensor:
    """act(gate) * up."""
    return opake_gated_activation(gate, up, activation=act)


def activated_backward(
    d: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, act: Activation
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(h, dgate, dup): the activation again, and its gradients for `d`. All are new."""
    if uses_triton(d, gate, up):
        dg, du = torch.empty_like(gate), torch.empty_like(up)
        gated_backward(d, gate, up, dg, du, act, False)
        return activated(gate, up, act), dg, du
    g, u = gate, up
    if act.limit:
        g, u = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
    value = act.reference(g, None)
    u = u + act.offset if act.offset else u
    dg, du = slope_times(act, d * u, g), d * value
    if act.limit:
        dg = dg.masked_fill_(act.beyond(gate), 0.0)
        du = du.masked_fill_(act.beyond(up.abs()), 0.0)
    return value.mul_(u), dg, du


def slope_times(act: Activation, e: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """e * act'(x)."""
    if act.kind == "silu" and act.alpha == 1.0:
        return torch.ops.aten.silu_backward(e, x)
    if act.kind == "silu":
        s = torch.sigmoid(act.alpha * x)
        return e * s * (1 + act.alpha * x * (1 - s))
    if act.kind in ("gelu", "gelu_tanh"):
        return torch.ops.aten.gelu_backward(e, x, approximate="tanh" if act.kind == "gelu_tanh" else "none")
    x = functional.relu(x)
    return e * (2 * x if act.kind == "relu2" else (x > 0))
