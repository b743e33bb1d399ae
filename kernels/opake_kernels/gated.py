"""Gated activations, act(gate) * up: SwiGLU, GeGLU and kin in one launch forward and one backward.

The two halves are given apart, or together in one (..., 2I) tensor, as two blocks or interleaved; together they are
read in place and their gradient is written into one buffer. Everything is element-wise, so a mapped dimension is one
more leading dimension. Leaves out the matrix products around it.
"""

from __future__ import annotations

from typing import Any

import torch

from .activations import Activation, activation_for
from .checks import autocast_to_widest, check_float, check_same_device, check_same_dtype, check_shape
from .fold import ROWS, function_pair
from .gated_kernels import gated_backward, gated_forward
from .launch import alike, uses_triton
from .strided_rows import dense_like

__all__ = [
    "gated_reference",
    "opake_gated_activation",
    "opake_geglu_approx",
    "opake_geglu_exact",
    "opake_relu_squared",
    "opake_swiglu",
]


def gated_reference(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    activation: str | Activation = "silu",
    interleaved: bool = False,
) -> torch.Tensor:
    """The plain twin of `opake_gated_activation`."""
    if up is None:
        gate, up = _halves(gate, interleaved)
    return activation_for(activation).reference(gate, up)


def _halves(gate_up: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if interleaved:
        return gate_up[..., ::2], gate_up[..., 1::2]
    half = gate_up.shape[-1] // 2
    return gate_up[..., :half], gate_up[..., half:]


def _forward(gate: torch.Tensor, up: torch.Tensor | None, groups: int, act: Activation) -> torch.Tensor:
    return gated_forward(gate, up, act, False)


def _backward(grads: Any, saved: Any, need: Any, groups: int, act: Activation) -> list[torch.Tensor | None]:
    (d,), (gate, up) = grads, saved
    made = [dense_like(gate) if wanted else None for wanted in need]
    gated_backward(d, gate, up, made[0], made[1], act, False)
    return made


def _combined_forward(gate_up: torch.Tensor, groups: int, act: Activation, paired: bool) -> torch.Tensor:
    if paired:
        return gated_forward(gate_up, None, act, True)
    return gated_forward(*_halves(gate_up, False), act, False)


def _combined_backward(grads: Any, saved: Any, need: Any, groups: int, act: Activation, paired: bool) -> Any:
    (d,), (gate_up,) = grads, saved
    made = dense_like(gate_up)
    if paired:
        gated_backward(d, gate_up, None, made, None, act, True)
    else:
        gated_backward(d, *_halves(gate_up, False), *_halves(made, False), act, False)
    return [made]


_gated = function_pair(
    "opake_gated_activation",
    forward=_forward,
    backward=_backward,
    roles=(ROWS, ROWS),
    save_inputs=(0, 1),
    outline=lambda gate, up, groups, act: [(gate.shape, gate.dtype)],
)
_gated_combined = function_pair(
    "opake_gated_activation_combined",
    forward=_combined_forward,
    backward=_combined_backward,
    roles=(ROWS,),
    save_inputs=(0,),
    outline=lambda x, groups, act, paired: [((*x.shape[:-1], x.shape[-1] // 2), x.dtype)],
)


def opake_gated_activation(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    activation: str | Activation = "silu",
    interleaved: bool = False,
) -> torch.Tensor:
    """act(gate) * up in one kernel, computed in fp32, rounded once to the dtype of `gate`.

    gate, up: (..., I), one floating dtype and device, any strides. Or gate alone: (..., 2I) holding both, gate first,
        or alternating with `interleaved=True` (gpt_oss); the halves are read in place. `activation`: a `hidden_act`
        name or an `Activation`. Returns (..., I). Raises TypeError (dtype), ValueError (shape, device, unknown
        activation).
    Source: Shazeer, "GLU Variants Improve Transformer" (2020).
    """
    act, op = activation_for(activation), "opake_gated_activation"
    if up is None:
        check_float(op, gate_up=gate)
        if not gate.dim() or gate.shape[-1] % 2:
            raise ValueError(f"{op}: gate_up has shape {tuple(gate.shape)}, expected an even last dimension (..., 2I)")
        if uses_triton(gate):
            return _gated_combined(gate, 0, act, interleaved)
        return gated_reference(gate, None, act, interleaved)
    check_float(op, gate=gate, up=up)
    if not interleaved and alike(gate, up):
        return _gated(gate, up, 0, act)
    if interleaved:
        raise ValueError(f"{op}: interleaved=True takes one combined tensor, got gate and up")
    gate, up = autocast_to_widest(gate, up)
    check_same_dtype(op, gate=gate, up=up)
    check_same_device(op, gate=gate, up=up)
    check_shape(op, "up", up.shape, gate.shape, "the shape of gate")
    return _gated(gate, up, 0, act) if uses_triton(gate, up) else act.reference(gate, up)


def opake_swiglu(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up; arguments as in `opake_gated_activation`."""
    return opake_gated_activation(gate, up, activation="silu")


def opake_geglu_exact(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """gelu(gate) * up with the error function; arguments as in `opake_gated_activation`."""
    return opake_gated_activation(gate, up, activation="gelu")


def opake_geglu_approx(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """gelu(gate) * up with the tanh form; arguments as in `opake_gated_activation`."""
    return opake_gated_activation(gate, up, activation="gelu_tanh")


def opake_relu_squared(x: torch.Tensor) -> torch.Tensor:
    """relu(x)^2, ungated (Nemotron; So et al., "Primer", 2021). x: (...), floating; the same shape and dtype back."""
    check_float("opake_relu_squared", x=x)
    act = activation_for("relu2")
    return _gated(x, None, 0, act) if uses_triton(x) and x.dim() else act.reference(x, None)
