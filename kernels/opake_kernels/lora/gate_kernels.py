"""The gated activation between low-rank terms: forward and backward in one launch each.

Forward reads the base products of gate and up, adds their low-rank terms in registers, and writes the activation alone.
Backward adds those terms again and that of the down projection, writes the gradients of gate and up, and contracts them
and the activation with the low-rank rows on the way, so that neither a summed gate nor H is ever in memory. Each
program owns a strip of columns over a chunk of the rows of one group; chunks are added afterwards in a fixed order.
Leaves out the matrix products with base weights, and ranks above `MAX_RANK`, whose sums do not fit in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from opake_kernels.activations import Activation, activate, activate_grad
from opake_kernels.launch import INTERPRET, cdiv, jit, launch, next_power_of_2, tl

__all__ = ["MAX_RANK", "gate_backward", "gate_forward"]

MAX_RANK = 64
# rows of a group that one program of the backward adds up
CHUNK = 512
# rows and columns of a tile, and warps
FORWARD_TILE = (32, 128, 4)
BACKWARD_TILE = (64, 64, 8)

Weight = torch.Tensor | None


@jit
def _rank_rows(Z, rows, row_mask, z_row, r, RANK: tl.constexpr, WIDEN: tl.constexpr):
    k = tl.arange(0, RANK)
    mask = row_mask[:, None] & (k < r)[None, :]
    z = tl.load(Z + rows[:, None] * z_row + k[None, :], mask=mask, other=0.0)
    if WIDEN:
        z = z.to(tl.float32)
    return z


@jit
def _rank_columns(B, cols, col_mask, b_rank, b_col, r, RANK: tl.constexpr, WIDEN: tl.constexpr):
    k = tl.arange(0, RANK).to(tl.int64)
    mask = (k < r)[:, None] & col_mask[None, :]
    b = tl.load(B + k[:, None] * b_rank + cols[None, :] * b_col, mask=mask, other=0.0)
    if WIDEN:
        b = b.to(tl.float32)
    return b


@jit
def _store_sum(P, acc, chunk, cols, col_mask, C, r, RANK: tl.constexpr):
    k = tl.arange(0, RANK)
    mask = col_mask[:, None] & (k < r)[None, :]
    tl.store(P + (chunk * C + cols)[:, None] * r + k[None, :], acc, mask=mask)


@jit
def _clamped(x, low, limit):
    # where, not minimum: a NaN stays one
    return tl.where(x > limit, limit, tl.where(x < low, low, x))


@jit
def _forward_kernel(
    G, U, Z, BG, BU, H, R, C, NB, z_row, bg_group, bg_rank, bg_col, bu_group, bu_rank, bu_col, rg, ru,
    alpha, limit, offset, KIND: tl.constexpr, CLAMP: tl.constexpr, RG: tl.constexpr, RU: tl.constexpr,
    WIDEN: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    block, strip = program // NB, program % NB
    blocks = (R + BR - 1) // BR
    group = block // blocks
    row = (block % blocks) * BR + tl.arange(0, BR)
    row_mask = row < R
    rows = group * R + row
    cols = strip * BC + tl.arange(0, BC)
    col_mask = cols < C
    at = rows[:, None] * C + cols[None, :]
    mask = row_mask[:, None] & col_mask[None, :]
    g = tl.load(G + at, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(U + at, mask=mask, other=0.0).to(tl.float32)
    if RG:
        z = _rank_rows(Z, rows, row_mask, z_row, rg, RG, WIDEN)
        b = _rank_columns(BG + group * bg_group, cols, col_mask, bg_rank, bg_col, rg, RG, WIDEN)
        g = tl.dot(z, b, acc=g, input_precision="ieee")
    if RU:
        z = _rank_rows(Z + rg, rows, row_mask, z_row, ru, RU, WIDEN)
        b = _rank_columns(BU + group * bu_group, cols, col_mask, bu_rank, bu_col, ru, RU, WIDEN)
        u = tl.dot(z, b, acc=u, input_precision="ieee")
    if CLAMP:
        g = tl.where(g > limit, limit, g)
        u = _clamped(u, -limit, limit)
    tl.store(H + at, activate(g, alpha, KIND) * (u + offset), mask=mask)


@jit
def _backward_kernel(
    D, G, U, DU, Z, K, BG, BU, A, PG, PU, PA, R, C, NB, NC, CHUNK, z_row, k_row,
    bg_group, bg_rank, bg_col, bu_group, bu_rank, bu_col, a_group, a_rank, a_col, rg, ru, rd, alpha, limit, offset,
    KIND: tl.constexpr, CLAMP: tl.constexpr, RG: tl.constexpr, RU: tl.constexpr, RD: tl.constexpr,
    STORE: tl.constexpr, WIDEN: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    chunk, strip = program // NB, program % NB
    group = chunk // NC
    start = (chunk % NC) * CHUNK
    stop = tl.minimum(start + CHUNK, R)
    cols = strip * BC + tl.arange(0, BC)
    col_mask = cols < C
    if RG:
        bg = _rank_columns(BG + group * bg_group, cols, col_mask, bg_rank, bg_col, rg, RG, WIDEN)
        sum_g = tl.zeros((BC, RG), tl.float32)
    if RU:
        bu = _rank_columns(BU + group * bu_group, cols, col_mask, bu_rank, bu_col, ru, RU, WIDEN)
        sum_u = tl.zeros((BC, RU), tl.float32)
    if RD:
        a = _rank_columns(A + group * a_group, cols, col_mask, a_rank, a_col, rd, RD, WIDEN)
        sum_a = tl.zeros((BC, RD), tl.float32)
    for first in range(start, stop, BR):
        row = first + tl.arange(0, BR)
        row_mask = row < stop
        rows = group * R + row
        at = rows[:, None] * C + cols[None, :]
        mask = row_mask[:, None] & col_mask[None, :]
        d = tl.load(D + at, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(G + at, mask=mask, other=0.0).to(tl.float32)
        u = tl.load(U + at, mask=mask, other=0.0).to(tl.float32)
        if RG:
            zg = _rank_rows(Z, rows, row_mask, z_row, rg, RG, WIDEN)
            g = tl.dot(zg, bg, acc=g, input_precision="ieee")
        if RU:
            zu = _rank_rows(Z + rg, rows, row_mask, z_row, ru, RU, WIDEN)
            u = tl.dot(zu, bu, acc=u, input_precision="ieee")
        if RD:
            k = _rank_rows(K, rows, row_mask, k_row, rd, RD, WIDEN)
            d = tl.dot(k, a, acc=d, input_precision="ieee")
        inside_g, inside_u = g <= limit, (u <= limit) & (u >= -limit)
        if CLAMP:
            g = tl.where(g > limit, limit, g)
            u = _clamped(u, -limit, limit)
        value, slope = activate_grad(g, alpha, KIND)  # pyright: ignore
        up = u + offset
        dg, du = d * up * slope, d * value
        if CLAMP:
            dg, du = tl.where(inside_g, dg, 0.0), tl.where(inside_u, du, 0.0)
        # rounded as they are stored, so that every use of a gradient sees the same number
        h, dg, du = (value * up).to(D.dtype.element_ty), dg.to(D.dtype.element_ty), du.to(D.dtype.element_ty)
        if STORE:
            tl.store(D + at, dg, mask=mask)
            tl.store(DU + at, du, mask=mask)
        if WIDEN:
            h, dg, du = h.to(tl.float32), dg.to(tl.float32), du.to(tl.float32)
        if RG:
            sum_g = tl.dot(tl.trans(dg), zg, acc=sum_g, input_precision="ieee")
        if RU:
            sum_u = tl.dot(tl.trans(du), zu, acc=sum_u, input_precision="ieee")
        if RD:
            sum_a = tl.dot(tl.trans(h), k, acc=sum_a, input_precision="ieee")
    if RG:
        _store_sum(PG, sum_g, chunk, cols, col_mask, C, rg, RG)
    if RU:
        _store_sum(PU, sum_u, chunk, cols, col_mask, C, ru, RU)
    if RD:
        _store_sum(PA, sum_a, chunk, cols, col_mask, C, rd, RD)


def _padded(rank: int) -> int:
    """The rank as a side of a tile: none, or at least the 16 that a tile product takes."""
    return max(16, next_power_of_2(rank)) if rank else 0


def _strides(w: Weight, rank_dim: int) -> tuple[int, int, int]:
    """Strides of the group (0 where all share), of the rank, and of the columns."""
    if w is None:
        return 0, 0, 0
    return (0 if w.shape[0] == 1 else w.stride(0)), w.stride(rank_dim), w.stride(3 - rank_dim)


def _constants(act: Activation, x: torch.Tensor) -> dict[str, Any]:
    # the interpreter multiplies half-precision tiles by their bits
    return {"KIND": act.kind, "CLAMP": bool(act.limit), "WIDEN": INTERPRET and x.dtype != torch.float32}


def _grouped(*weights: Weight) -> bool:
    return any(w is not None and w.shape[0] > 1 for w in weights)


def gate_forward(
    G: torch.Tensor, U: torch.Tensor, Z: torch.Tensor, Bg: Weight, Bu: Weight, act: Activation
) -> torch.Tensor:
    """act(G + Zg Bg) * (U + Zu Bu); G, U (G, R, I), Z (G, R, rg + ru), B (1|G, r, I), all of one dtype."""
    H = torch.empty_like(G)
    groups, C = G.shape[0], G.shape[2]
    R = G.shape[1]
    if not _grouped(Bg, Bu):
        groups, R = 1, groups * R
    rg, ru = (0 if b is None else b.shape[1] for b in (Bg, Bu))
    BR, BC, warps = FORWARD_TILE
    NB = cdiv(C, BC)
    launch(
        _forward_kernel, (groups * cdiv(R, BR) * NB,), G, G, U, Z, G if Bg is None else Bg, G if Bu is None else Bu, H,
        R, C, NB, Z.stride(1), *_strides(Bg, 1), *_strides(Bu, 1), rg, ru, act.alpha, act.limit, act.offset,
        **_constants(act, G), RG=_padded(rg), RU=_padded(ru), BR=BR, BC=BC, num_warps=warps,
    )  # fmt: skip
    return H


def gate_backward(
    D: torch.Tensor,
    G: torch.Tensor,
    U: torch.Tensor,
    Z: torch.Tensor,
    K: torch.Tensor,
    B: Sequence[Weight],
    A: Weight,
    act: Activation,
    store: bool,
) -> tuple[torch.Tensor | None, list[Weight]]:
    """The gradient of up, and the sums dBg^T, dBu^T, dA of each group (G, I, r) in fp32 (None without an adapter).

    D: (G, R, I), the base part of the gradient of the activation, contiguous; it becomes the gradient of gate if
    `store`. K: (G, R, rd); A: (1|G, I, rd), low-rank factors of the down projection.
    """
    groups, R, C = D.shape
    DU = torch.empty_like(D) if store else None
    rg, ru, rd = 0 if B[0] is None else B[0].shape[1], 0 if B[1] is None else B[1].shape[1], K.shape[2]
    BR, BC, warps = BACKWARD_TILE
    NB = cdiv(C, BC)
    size = _chunk(groups, R, NB)
    NC = max(1, cdiv(R, size))
    sums = [torch.empty(groups * NC, C, r, dtype=torch.float32, device=D.device) if r else None for r in (rg, ru, rd)]
    launch(
        _backward_kernel, (groups * NC * NB,), D, D, G, U, D if DU is None else DU, Z, K,
        *(D if w is None else w for w in (*B, A, *sums)), R, C, NB, NC, size, Z.stride(1), K.stride(1),
        *_strides(B[0], 1), *_strides(B[1], 1), *_strides(A, 2), rg, ru, rd, act.alpha, act.limit, act.offset,
        **_constants(act, D), RG=_padded(rg), RU=_padded(ru), RD=_padded(rd), STORE=store, BR=BR, BC=BC, num_warps=warps,
    )  # fmt: skip
    if NC == 1:
        return DU, sums
    return DU, [None if s is None else s.view(groups, NC, *s.shape[1:]).sum(1) for s in sums]


def _chunk(groups: int, R: int, strips: int) -> int:
    """Rows a program adds up: fewer than `CHUNK` where that leaves the device with too few programs."""
    size = CHUNK
    while size > 64 and groups * cdiv(R, size) * strips < 512:
        size //= 2
    return size
