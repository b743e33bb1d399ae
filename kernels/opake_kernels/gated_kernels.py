"""Triton kernels of the gated activations, and the way from tensors to their launches; the op is gated.py.

Contiguous operands are one long row, whatever their shape; others are read row by row through their strides, which is
how the halves of a combined tensor stay where they are. Leaves out every check: the public functions have made them.
"""

from __future__ import annotations

from typing import Any

import torch

from .activations import Activation, activate, activate_grad, kernel_kind
from .launch import cdiv, jit, launch, tl
from .strided_rows import dense_like

__all__ = ["gated_backward", "gated_forward"]


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


@jit(do_not_specialize=["NB"])
def gated_fwd_kernel(
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


@jit(do_not_specialize=["NB"])
def gated_bwd_kernel(
    D, G, U, DG, DU, C, WIDE, NB, row_d, row_g, row_u, row_dg, row_du, alpha, limit, within, offset,
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
    inside_g, inside_u = g <= within, (u <= within) & (u >= -within)
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


def gated_forward(gate: torch.Tensor, up: torch.Tensor | None, act: Activation, paired: bool) -> torch.Tensor:
    """`up` None: ungated, or `gate` holds interleaved pairs (`paired`)."""
    if paired:
        out = torch.empty((*gate.shape[:-1], gate.shape[-1] // 2), dtype=gate.dtype, device=gate.device)
    else:
        out = dense_like(gate)
    if not out.numel():
        return out
    (g, u), R, C = _as_rows(gate, gate if up is None else up)
    C = C // 2 if paired else C
    h = out if R == 1 else out.view(R, C)
    block, warps = _block(C)
    NB = cdiv(C, block)
    launch(
        gated_fwd_kernel, (R * NB,), g, g, u, h, C, 2 * C, NB, *(_row_stride(t, R) for t in (g, u, h)),
        act.alpha, act.limit, act.offset, **_constants(act, gate), GATED=up is not None or paired, PAIRED=paired,
        BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return out


def gated_backward(
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
        gated_bwd_kernel, (R * NB,), d, d, g, u, first, last, C, 2 * C, NB,
        *(_row_stride(t, R) for t in (d, g, u, first, last)), act.alpha, act.limit, act.within, act.offset,
        **_constants(act, gate),
        GATED=up is not None or paired, PAIRED=paired, NEED_G=dg is not None, NEED_U=du is not None,
        BLOCK=block, num_warps=warps,
    )  # fmt: skip
