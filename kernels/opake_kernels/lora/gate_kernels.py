"""Backward of the gated activation with the adapter gradients summed on the way, in one launch.

The gradients of gate and up are written once; while they are in registers they are contracted with the low-rank rows,
and the activation, computed again, with those of the down projection: three passes over the widest tensors are saved,
and the activation is never in memory. Each program owns a strip of columns over a chunk of the rows of one group;
chunks are added afterwards in a fixed order. Leaves out the matrix products with weights, and ranks above `MAX_RANK`,
whose sums do not fit in registers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from opake_kernels.activations import Activation, activate_grad, kernel_kind
from opake_kernels.launch import INTERPRET, cdiv, jit, launch, next_power_of_2, tl

__all__ = ["MAX_RANK", "gate_backward"]

MAX_RANK = 64
# rows of a group that one program adds up at most, and programs that keep the device busy
CHUNK, PROGRAMS = 512, 512
# columns of a tile, and warps
BC, WARPS = 64, 4

Weight = torch.Tensor | None


@jit
def _rank_rows(Z, row, row_mask, z_row, r, RANK: tl.constexpr, WIDEN: tl.constexpr):
    k = tl.arange(0, RANK)
    z = tl.load(Z + row[:, None] * z_row + k[None, :], mask=row_mask[:, None] & (k < r)[None, :], other=0.0)
    if WIDEN:
        z = z.to(tl.float32)
    return z


@jit
def _store_sum(P, acc, col, col_mask, r, RANK: tl.constexpr):
    k = tl.arange(0, RANK)
    tl.store(P + col[:, None] * r + k[None, :], acc, mask=col_mask[:, None] & (k < r)[None, :])


@jit
def _kernel(
    D, G, U, DU, Z, K, PG, PU, PA, R, C, NB, NC, CHUNK, z_row, k_row, rg, ru, rd, alpha, limit, within, offset,
    KIND: tl.constexpr, CLAMP: tl.constexpr, RG: tl.constexpr, RU: tl.constexpr, RD: tl.constexpr,
    WHOLE: tl.constexpr, WIDEN: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    chunk, strip = program // NB, program % NB
    start = (chunk % NC) * CHUNK
    count = tl.minimum(CHUNK, R - start)
    # int64 once; inside the chunk a tile's addresses fit in 32 bits
    origin = (chunk // NC).to(tl.int64) * R + start
    row, col = tl.arange(0, BR), tl.arange(0, BC)
    inside = row[:, None] * C + col[None, :]
    col_mask = col < C - strip * BC
    if RG:
        sum_g = tl.zeros((BC, RG), tl.float32)
    if RU:
        sum_u = tl.zeros((BC, RU), tl.float32)
    if RD:
        sum_a = tl.zeros((BC, RD), tl.float32)
    for first in tl.range(0, count, BR, num_stages=STAGES):  # pyright: ignore
        row_mask = row < count - first
        line = origin + first
        here = line * C + strip * BC
        if WHOLE:
            # no tile hangs over an edge
            d, g, u = tl.load(D + here + inside), tl.load(G + here + inside), tl.load(U + here + inside)
        else:
            mask = row_mask[:, None] & col_mask[None, :]
            d = tl.load(D + here + inside, mask=mask, other=0.0)
            g = tl.load(G + here + inside, mask=mask, other=0.0)
            u = tl.load(U + here + inside, mask=mask, other=0.0)
        d, g, u = d.to(tl.float32), g.to(tl.float32), u.to(tl.float32)
        inside_g, inside_u = g <= within, (u <= within) & (u >= -within)
        if CLAMP:
            # where, not minimum: a NaN stays one
            g = tl.where(g > limit, limit, g)
            u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
        value, slope = activate_grad(g, alpha, KIND)  # pyright: ignore
        up = u + offset
        dg, du = d * up * slope, d * value
        if CLAMP:
            dg, du = tl.where(inside_g, dg, 0.0), tl.where(inside_u, du, 0.0)
        # rounded as they are stored, so that every use of a gradient sees the same number
        h, dg, du = (value * up).to(D.dtype.element_ty), dg.to(D.dtype.element_ty), du.to(D.dtype.element_ty)
        if WHOLE:
            tl.store(D + here + inside, dg)
            tl.store(DU + here + inside, du)
        else:
            tl.store(D + here + inside, dg, mask=mask)
            tl.store(DU + here + inside, du, mask=mask)
        if WIDEN:
            h, dg, du = h.to(tl.float32), dg.to(tl.float32), du.to(tl.float32)
        if RG:
            z = _rank_rows(Z + line * z_row, row, row_mask, z_row, rg, RG, WIDEN)
            sum_g = tl.dot(tl.trans(dg), z, acc=sum_g, input_precision="ieee")
        if RU:
            z = _rank_rows(Z + line * z_row + rg, row, row_mask, z_row, ru, RU, WIDEN)
            sum_u = tl.dot(tl.trans(du), z, acc=sum_u, input_precision="ieee")
        if RD:
            k = _rank_rows(K + line * k_row, row, row_mask, k_row, rd, RD, WIDEN)
            sum_a = tl.dot(tl.trans(h), k, acc=sum_a, input_precision="ieee")
    place = chunk.to(tl.int64) * C + strip * BC
    if RG:
        _store_sum(PG + place * rg, sum_g, col, col_mask, rg, RG)
    if RU:
        _store_sum(PU + place * ru, sum_u, col, col_mask, ru, RU)
    if RD:
        _store_sum(PA + place * rd, sum_a, col, col_mask, rd, RD)


def gate_backward(
    D: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    Z: torch.Tensor,
    K: torch.Tensor,
    columns: Sequence[slice],
    groups: int,
    act: Activation,
) -> tuple[torch.Tensor, list[Weight]]:
    """The gradient of up, and the sums dgate^T Zg, dup^T Zu, h^T K of each group, (G, I, r) in fp32; None for rank 0.

    D: (N, I), the gradient of the activation; that of gate takes its place. gate, up: (N, I). Z: (N, rg + ru), its
    `columns` belonging to gate and up. K: (N, rd). All contiguous and of one dtype.
    """
    N, C = D.shape
    R = N // groups if groups else 0
    DU = torch.empty_like(D)
    ranks = [c.stop - c.start for c in columns] + [K.shape[1]]
    RG, RU, RD = (max(16, next_power_of_2(r)) if r else 0 for r in ranks)
    # tiles on their way keep a multiprocessor fed where twelve warps of it fit beside them; fp32 has no room for them
    short = D.dtype.itemsize == 2
    BR, STAGES, NB = 64 if short and max(RG, RU, RD) <= 32 else 32, 3 if short else 1, cdiv(C, BC)
    size = _chunk(groups, R, NB)
    NC = max(1, cdiv(R, size))
    sums = [torch.empty(groups * NC, C, r, dtype=torch.float32, device=D.device) if r else None for r in ranks]
    launch(
        _kernel, (groups * NC * NB,), D, D, gate, up, DU, Z, K, *(D if s is None else s for s in sums),
        R, C, NB, NC, size, Z.stride(0), K.stride(0), *ranks, act.alpha, act.limit, act.within,
        act.offset,
        KIND=kernel_kind(act, D.dtype), CLAMP=bool(act.limit), RG=RG, RU=RU, RD=RD,
        WHOLE=C % BC == 0 and R % BR == 0 and size % BR == 0,
        # the interpreter multiplies half-precision tiles by their bits
        WIDEN=INTERPRET and D.dtype != torch.float32, BR=BR, BC=BC, STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    if NC == 1:
        return DU, sums
    return DU, [None if s is None else s.view(groups, NC, *s.shape[1:]).sum(1) for s in sums]


def _chunk(groups: int, R: int, strips: int) -> int:
    """Rows a program adds up: fewer than `CHUNK` where that leaves the device with too few programs."""
    size = CHUNK
    while size > 64 and groups * cdiv(R, size) * strips < PROGRAMS:
        size //= 2
    return size
