"""Gated activations, act(gate) * up: SwiGLU, GeGLU and kin in one launch forward and one backward.

The two halves are given apart, or together in one (..., 2I) tensor, as two blocks or interleaved; together they are
read in place and their gradient is written into one buffer. Everything is element-wise, so a mapped dimension is one
more leading dimension. Leaves out the matrix products around it.
"""

from __future__ import annotations

from typing import Any

import torch

from .activations import Activation, activate, activate_grad, activation_for, kernel_kind
from .checks import autocast_to_widest, check_float, check_same_device, check_same_dtype, check_shape
from .fold import ROWS, function_pair
from .launch import cdiv, jit, launch, tl, uses_triton

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


@jit
def _load_halves(G, U, start, C, WIDE, GATED: tl.constexpr, PAIRED: tl.constexpr, BLOCK: tl.constexpr):
    if PAIRED:
        # gate and up alternate: one wide read, then split in registers
        cols = start * 2 + tl.arange(0, 2 * BLOCK)
        both = tl.load(G + cols, mask=cols < WIDE, other=0.0).to(tl.float32)
        g, u = tl.split(tl.reshape(both, (BLOCK, 2)))
    else:
        cols = start + tl.arange(0, BLOCK)
        g = tl.load(G + cols, mask=cols < C, other=0.0).to(tl.float32)
        u = tl.load(U + cols, mask=cols < C, other=0.0).to(tl.float32) if GATED else g
    return g, u


@jit
def _forward_kernel(
    G, U, H, C, WIDE, NB, row_g, row_u, row_h, alpha, limit, offset,
    KIND: tl.constexpr, GATED: tl.constexpr, PAIRED: tl.constexpr, CLAMP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    # divided in 32 bits, addressed in 64
    row, start = (program // NB).to(tl.int64), (program % NB).to(tl.int64) * BLOCK
    g, u = _load_halves(G + row * row_g, U + row * row_u, start, C, WIDE, GATED, PAIRED, BLOCK)  # pyright: ignore
    if CLAMP:
        # where, not minimum: a NaN stays one
        g = tl.where(g > limit, limit, g)
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    h = activate(g, alpha, KIND)
    if GATED:
        h = h * (u + offset)
    cols = start + tl.arange(0, BLOCK)
    tl.store(H + row * row_h + cols, h, mask=cols < C)


@jit
def _backward_kernel(
    D, G, U, DG, DU, C, WIDE, NB, row_d, row_g, row_u, row_dg, row_du, alpha, limit, offset,
    KIND: tl.constexpr, GATED: tl.constexpr, PAIRED: tl.constexpr, CLAMP: tl.constexpr,
    NEED_G: tl.constexpr, NEED_U: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    # divided in 32 bits, addressed in 64
    row, start = (program // NB).to(tl.int64), (program % NB).to(tl.int64) * BLOCK
    cols = start + tl.arange(0, BLOCK)
    mask = cols < C
    d = tl.load(D + row * row_d + cols, mask=mask, other=0.0).to(tl.float32)
    g, u = _load_halves(G + row * row_g, U + row * row_u, start, C, WIDE, GATED, PAIRED, BLOCK)  # pyright: ignore
    inside_g, inside_u = g <= limit, (u <= limit) & (u >= -limit)
    if CLAMP:
        g = tl.where(g > limit, limit, g)
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    value, slope = activate_grad(g, alpha, KIND)
    dg = d * slope
    if GATED:
        dg = dg * (u + offset)
    du = d * value
    if CLAMP:
        dg, du = tl.where(inside_g, dg, 0.0), tl.where(inside_u, du, 0.0)
    if PAIRED:
        pair_cols = start * 2 + tl.arange(0, 2 * BLOCK)
        tl.store(DG + row * row_dg + pair_cols, tl.interleave(dg, du), mask=pair_cols < WIDE)
    else:
        if NEED_G:
            tl.store(DG + row * row_dg + cols, dg, mask=mask)
        if NEED_U:
            tl.store(DU + row * row_du + cols, du, mask=mask)


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """(..., C) as (R, C) with unit column stride: a view where it can be one."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _as_rows(*tensors: torch.Tensor) -> tuple[list[torch.Tensor], int, int]:
    """(tensors, R, C): everything as one long row if all are contiguous, else one row a row."""
    if all(t.is_contiguous() for t in tensors):
        return list(tensors), 1, tensors[0].numel()
    matrices = [_matrix(t) for t in tensors]
    return matrices, matrices[0].shape[0], matrices[0].shape[1]


def _row_stride(x: torch.Tensor, R: int) -> int:
    return 0 if R == 1 else x.stride(0)


def _block(C: int) -> tuple[int, int]:
    """Columns and warps a program; the widest block that wastes at most an eighth of its lanes."""
    for block in (4096, 2048):
        if block <= C and cdiv(C, block) * block * 7 <= C * 8:
            return block, block // 512
    return 1024, 4


def _constants(act: Activation, x: torch.Tensor) -> dict[str, Any]:
    return {"KIND": kernel_kind(act, x.dtype), "CLAMP": bool(act.limit)}


def _launch_forward(gate: torch.Tensor, up: torch.Tensor | None, act: Activation, paired: bool) -> torch.Tensor:
    """`up` None: ungated, or `gate` holds interleaved pairs (`paired`)."""
    shape = (*gate.shape[:-1], gate.shape[-1] // 2) if paired else gate.shape
    out = torch.empty(shape, dtype=gate.dtype, device=gate.device)
    if not out.numel():
        return out
    (g, u), R, C = _as_rows(gate, gate if up is None else up)
    C = C // 2 if paired else C
    h = out if R == 1 else out.view(R, C)
    block, warps = _block(C)
    NB = cdiv(C, block)
    launch(
        _forward_kernel, (R * NB,), g, g, u, h, C, 2 * C, NB, *(_row_stride(t, R) for t in (g, u, h)),
        act.alpha, act.limit, act.offset, **_constants(act, gate), GATED=up is not None or paired, PAIRED=paired,
        BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return out


def _launch_backward(
    d: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    dg: torch.Tensor | None,
    du: torch.Tensor | None,
    act: Activation,
    paired: bool,
) -> None:
    """Writes the gradients that are wanted into `dg`, `du`, laid out like one another."""
    made = [t for t in (dg, du) if t is not None]
    if not d.numel() or not made:
        return
    # read-only operands may be copied to get unit column stride, the written ones already have it
    (d, g, u, *written), R, C = _as_rows(d, gate, gate if up is None else up, *made)
    first, last = written[0], written[-1]
    block, warps = _block(C)
    NB = cdiv(C, block)
    launch(
        _backward_kernel, (R * NB,), d, d, g, u, first, last, C, 2 * C, NB,
        *(_row_stride(t, R) for t in (d, g, u, first, last)), act.alpha, act.limit, act.offset, **_constants(act, gate),
        GATED=up is not None or paired, PAIRED=paired, NEED_G=dg is not None, NEED_U=du is not None,
        BLOCK=block, num_warps=warps,
    )  # fmt: skip


def _forward(gate: torch.Tensor, up: torch.Tensor | None, groups: int, act: Activation) -> torch.Tensor:
    return _launch_forward(gate, up, act, False)


def _backward(grads: Any, saved: Any, need: Any, groups: int, act: Activation) -> list[torch.Tensor | None]:
    (d,), (gate, up) = grads, saved
    made = [torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) if wanted else None for wanted in need]
    _launch_backward(d, gate, up, made[0], made[1], act, False)
    return made


def _combined_forward(gate_up: torch.Tensor, groups: int, act: Activation, paired: bool) -> torch.Tensor:
    if paired:
        return _launch_forward(gate_up, None, act, True)
    return _launch_forward(*_halves(gate_up, False), act, False)


def _combined_backward(grads: Any, saved: Any, need: Any, groups: int, act: Activation, paired: bool) -> Any:
    (d,), (gate_up,) = grads, saved
    made = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    if paired:
        _launch_backward(d, gate_up, None, made, None, act, True)
    else:
        _launch_backward(d, *_halves(gate_up, False), *_halves(made, False), act, False)
    return [made]


_gated = function_pair(
    "opake_gated_activation", forward=_forward, backward=_backward, roles=(ROWS, ROWS), save_inputs=(0, 1)
)
_gated_combined = function_pair(
    "opake_gated_activation_combined",
    forward=_combined_forward,
    backward=_combined_backward,
    roles=(ROWS,),
    save_inputs=(0,),
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
