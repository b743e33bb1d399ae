"""The gated activation with all low-rank terms of the widest tensors taken on the way: a launch forward, one backward.

Gate, up and the gradient of the activation come as the products with base weights alone, and what the adapters add to
them is never in memory. Backward, the gradients of gate and up are written once; while they are in registers they are
contracted with the low-rank rows, and the activation, computed again, with those of the down projection. Each program
owns a strip of columns over a chunk of the rows of one group; chunks are added afterwards in a fixed order. Leaves out
the matrix products with weights, and ranks above `MAX_RANK`, whose sums do not fit in registers.
"""

from __future__ import annotations

from opake_kernels.activations import activate, activate_grad
from opake_kernels.launch import jit, tl

__all__ = ["gate_backward_kernel", "gate_forward_kernel"]


@jit
def _place(R, NB, NC, CHUNK):
    """(chunk, strip, group, first row, rows) of this program."""
    program = tl.program_id(0)
    chunk, strip = program // NB, program % NB
    group, start = (chunk // NC).to(tl.int64), (chunk % NC) * CHUNK
    # int64 once; inside the chunk a tile's addresses fit in 32 bits
    return chunk, strip, group, group * R + start, tl.minimum(CHUNK, R - start)


@jit
def _rank_rows(Z, row, row_mask, z_row, r, RANK: tl.constexpr, WIDEN: tl.constexpr):
    k = tl.arange(0, RANK)
    z = tl.load(Z + row[:, None] * z_row + k[None, :], mask=row_mask[:, None] & (k < r)[None, :], other=0.0)
    if WIDEN:
        z = z.to(tl.float32)
    return z


@jit
def _factor(B, b_rank, b_col, col, col_mask, r, RANK: tl.constexpr, WIDEN: tl.constexpr):
    k = tl.arange(0, RANK)
    mask = (k < r)[:, None] & col_mask[None, :]
    b = tl.load(B + k[:, None] * b_rank + col[None, :] * b_col, mask=mask, other=0.0)
    if WIDEN:
        b = b.to(tl.float32)
    return b


@jit
def _store_sum(P, acc, col, col_mask, r, RANK: tl.constexpr):
    k = tl.arange(0, RANK)
    tl.store(P + col[:, None] * r + k[None, :], acc, mask=col_mask[:, None] & (k < r)[None, :])


@jit
def _clamped(g, u, limit):
    # where, not minimum: a NaN stays one
    return tl.where(g > limit, limit, g), tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))


@jit
def gate_forward_kernel(
    G, U, H, Z, BG, BU, R, C, NB, NC, CHUNK, z_row, bg_group, bg_rank, bg_col, bu_group, bu_rank, bu_col, rg, ru,
    alpha, limit, offset, KIND: tl.constexpr, CLAMP: tl.constexpr, RG: tl.constexpr, RU: tl.constexpr,
    WHOLE: tl.constexpr, WIDEN: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    _, strip, group, origin, count = _place(R, NB, NC, CHUNK)  # pyright: ignore
    row, col = tl.arange(0, BR), tl.arange(0, BC)
    inside = row[:, None] * C + col[None, :]
    col_mask = col < C - strip * BC
    if RG:
        bg = _factor(BG + group * bg_group, bg_rank, bg_col, strip * BC + col, col_mask, rg, RG, WIDEN)
    if RU:
        bu = _factor(BU + group * bu_group, bu_rank, bu_col, strip * BC + col, col_mask, ru, RU, WIDEN)
    for first in tl.range(0, count, BR, num_stages=STAGES):  # pyright: ignore
        row_mask = row < count - first
        line = origin + first
        here = line * C + strip * BC
        if WHOLE:
            # no tile hangs over an edge
            g, u = tl.load(G + here + inside), tl.load(U + here + inside)
        else:
            mask = row_mask[:, None] & col_mask[None, :]
            g = tl.load(G + here + inside, mask=mask, other=0.0)
            u = tl.load(U + here + inside, mask=mask, other=0.0)
        g, u = g.to(tl.float32), u.to(tl.float32)
        if RG:
            z = _rank_rows(Z + line * z_row, row, row_mask, z_row, rg, RG, WIDEN)
            g = tl.dot(z, bg, acc=g, input_precision="ieee")
        if RU:
            z = _rank_rows(Z + line * z_row + rg, row, row_mask, z_row, ru, RU, WIDEN)
            u = tl.dot(z, bu, acc=u, input_precision="ieee")
        if CLAMP:
            g, u = _clamped(g, u, limit)  # pyright: ignore
        h = activate(g, alpha, KIND) * (u + offset)  # pyright: ignore
        if WHOLE:
            tl.store(H + here + inside, h)
        else:
            tl.store(H + here + inside, h, mask=mask)


@jit
def gate_backward_kernel(
    D, G, U, DU, Z, K, BG, BU, A, PG, PU, PA, R, C, NB, NC, CHUNK, z_row, k_row, bg_group, bg_rank, bg_col,
    bu_group, bu_rank, bu_col, a_group, a_rank, a_col, rg, ru, rd, alpha, limit, within, offset,
    KIND: tl.constexpr, CLAMP: tl.constexpr, RG: tl.constexpr, RU: tl.constexpr, RD: tl.constexpr,
    WHOLE: tl.constexpr, WIDEN: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    chunk, strip, group, origin, count = _place(R, NB, NC, CHUNK)  # pyright: ignore
    row, col = tl.arange(0, BR), tl.arange(0, BC)
    inside = row[:, None] * C + col[None, :]
    col_mask = col < C - strip * BC
    if RG:
        sum_g = tl.zeros((BC, RG), tl.float32)
        bg = _factor(BG + group * bg_group, bg_rank, bg_col, strip * BC + col, col_mask, rg, RG, WIDEN)
    if RU:
        sum_u = tl.zeros((BC, RU), tl.float32)
        bu = _factor(BU + group * bu_group, bu_rank, bu_col, strip * BC + col, col_mask, ru, RU, WIDEN)
    if RD:
        sum_a = tl.zeros((BC, RD), tl.float32)
        a = _factor(A + group * a_group, a_rank, a_col, strip * BC + col, col_mask, rd, RD, WIDEN)
    for first in tl.range(0, count, BR, num_stages=STAGES):  # pyright: ignore
        row_mask = row < count - first
        line = origin + first
        here = line * C + strip * BC
        if WHOLE:
            d, g, u = tl.load(D + here + inside), tl.load(G + here + inside), tl.load(U + here + inside)
        else:
            mask = row_mask[:, None] & col_mask[None, :]
            d = tl.load(D + here + inside, mask=mask, other=0.0)
            g = tl.load(G + here + inside, mask=mask, other=0.0)
            u = tl.load(U + here + inside, mask=mask, other=0.0)
        d, g, u = d.to(tl.float32), g.to(tl.float32), u.to(tl.float32)
        if RG:
            zg = _rank_rows(Z + line * z_row, row, row_mask, z_row, rg, RG, WIDEN)
            g = tl.dot(zg, bg, acc=g, input_precision="ieee")
        if RU:
            zu = _rank_rows(Z + line * z_row + rg, row, row_mask, z_row, ru, RU, WIDEN)
            u = tl.dot(zu, bu, acc=u, input_precision="ieee")
        if RD:
            k = _rank_rows(K + line * k_row, row, row_mask, k_row, rd, RD, WIDEN)
            d = tl.dot(k, a, acc=d, input_precision="ieee")
        inside_g, inside_u = g <= within, (u <= within) & (u >= -within)
        if CLAMP:
            g, u = _clamped(g, u, limit)  # pyright: ignore
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
            # rows beyond the group are zeros, which an infinite factor makes NaN
            h, dg, du = tl.where(mask, h, 0.0), tl.where(mask, dg, 0.0), tl.where(mask, du, 0.0)
        if WIDEN:
            h, dg, du = h.to(tl.float32), dg.to(tl.float32), du.to(tl.float32)
        if RG:
            sum_g = tl.dot(tl.trans(dg), zg, acc=sum_g, input_precision="ieee")
        if RU:
            sum_u = tl.dot(tl.trans(du), zu, acc=sum_u, input_precision="ieee")
        if RD:
            sum_a = tl.dot(tl.trans(h), k, acc=sum_a, input_precision="ieee")
    place = chunk.to(tl.int64) * C + strip * BC
    if RG:
        _store_sum(PG + place * rg, sum_g, col, col_mask, rg, RG)
    if RU:
        _store_sum(PU + place * ru, sum_u, col, col_mask, ru, RU)
    if RD:
        _store_sum(PA + place * rd, sum_a, col, col_mask, rd, RD)
