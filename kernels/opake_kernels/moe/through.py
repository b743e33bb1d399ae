"""The gate of sorted rows in plain torch, forward and backward, with as few passes over memory as torch allows.

On a CPU the passes between two products cost as much as their traffic does, so results take the place of what is no
longer needed. The numbers are those of `gated_reference` and its derivative.
"""

from __future__ import annotations

import torch

from opake_kernels.activations import Activation
from opake_kernels.lora.gate import slope_times

__all__ = ["gate_backward", "gate_forward"]


def gate_forward(both: torch.Tensor, act: Activation, paired: bool) -> torch.Tensor:
    """act(gate) * up, (S, I), of gate and up (S, 2I)."""
    g, u = _clamped(*_halves(both, paired), act)
    return act.reference(g, None).mul_(u)


def gate_backward(
    dh: torch.Tensor, weight: torch.Tensor, both: torch.Tensor, act: Activation, paired: bool, need_hidden: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """The gradient of gate and up for rows that count `weight` (S, 1), the activation if wanted, and dh . activation.

    dh (S, I), the gradient of the activation of a row that counts one, is overwritten.
    """
    gate, up = _halves(both, paired)
    g, u = _clamped(gate, up, act)
    value = act.reference(g, None)
    hidden = value * u
    inner = (dh * hidden).sum(1, dtype=weight.dtype)
    dh.mul_(weight)
    dg = slope_times(act, torch.mul(dh, u, out=None if need_hidden else hidden), g)
    du = value.mul_(dh)
    if act.limit:
        dg = dg.masked_fill_(gate > act.limit, 0.0)
        du = du.masked_fill_((up > act.limit) | (up < -act.limit), 0.0)
    dgu = torch.stack((dg, du), dim=-1).flatten(1) if paired else torch.cat((dg, du), dim=1)
    return dgu, hidden if need_hidden else None, inner


def _halves(both: torch.Tensor, paired: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if paired:
        return both[:, ::2], both[:, 1::2]
    I = both.shape[1] // 2
    return both[:, :I], both[:, I:]


def _clamped(gate: torch.Tensor, up: torch.Tensor, act: Activation) -> tuple[torch.Tensor, torch.Tensor]:
    """What goes into the activation, and what it is multiplied with."""
    if act.limit:
        gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
    return gate, up + act.offset if act.offset else up
