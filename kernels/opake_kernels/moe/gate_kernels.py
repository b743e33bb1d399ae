"""The gated half of the experts as two kernels: act(gate) * up, and its backward with everything in between recomputed.

Forward reads the token of each row in place (no gathered copy of x) and writes the activation only. Backward computes
gate and up again, then the gradient of the activation in a second product of the same tile, so neither is ever written:
what leaves is the gradient of gate and up, and the part of each row in the gradient of its routing weight. A tile has
rows of one expert only, and each row is a product of its own, whatever its neighbours hold.
"""

from __future__ import annotations

from opake_kernels.activations import activate, activate_grad
from opake_kernels.launch import jit, tl

__all__ = ["gate_backward_kernel", "gate_forward_kernel", "placed", "product"]


@jit
def placed(program, tiles, blocks, GROUP: tl.constexpr):
    """(tile, block) of a program: GROUP tiles go through the blocks together, so that they share what they read."""
    first = program // (GROUP * blocks) * GROUP
    width = tl.minimum(tiles - first, GROUP)
    inside = program - first * blocks
    return first + inside % width, inside // width


@jit
def product(
    acc, A, B, rows, cols, K, row_a, step_a, step_b, col_b,
    EVEN: tl.constexpr, PRECISE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """acc += A[rows, :K] @ B[:K, cols]; rows and cols must be in bounds."""
    k = tl.arange(0, BK)
    a = A + rows[:, None] * row_a + k[None, :] * step_a
    b = B + k[:, None] * step_b + cols[None, :] * col_b
    for start in range(0, K, BK):
        if EVEN:
            left, right = tl.load(a), tl.load(b)
        else:
            left = tl.load(a, mask=k[None, :] < K - start, other=0.0)
            right = tl.load(b, mask=k[:, None] < K - start, other=0.0)
        acc = tl.dot(left, right, acc, input_precision="ieee" if PRECISE else None)
        a += BK * step_a
        b += BK * step_b
    return acc


@jit
def _gate_and_up(
    X, W, BIAS, Z, L, e, r, token, n0, H, I, row_x, w_e, w_n, w_k, l_e, l_n, l_k,
    HAS_BIAS: tl.constexpr, RANK: tl.constexpr, PAIRED: tl.constexpr, EVEN: tl.constexpr, PRECISE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """gate and up (BM, BN) of one tile in fp32: one product of width 2 BN, in which the two alternate."""
    j = tl.arange(0, 2 * BN)
    inside = n0 + j // 2 < I
    cols = n0 * 2 + j if PAIRED else (j % 2) * I + n0 + j // 2
    cols = tl.where(inside, cols, 0)
    acc = tl.zeros((BM, 2 * BN), dtype=tl.float32)
    acc = product(acc, X, W + e * w_e, token, cols.to(tl.int64), H, row_x, 1, w_k, w_n, EVEN, PRECISE, BK)
    if RANK:
        acc = product(acc, Z, L + e * l_e, r, cols.to(tl.int64), RANK, RANK, 1, l_k, l_n, RANK % BR == 0, PRECISE, BR)
    if HAS_BIAS:
        acc += tl.load(BIAS + e * 2 * I + cols)[None, :].to(tl.float32)
    # rounded as a product of the vendor's library is
    acc = acc.to(X.dtype.element_ty)
    gate, up = tl.split(tl.reshape(acc, (BM, BN, 2)))
    return gate, up


@jit
def _clamped(gate, up, limit):
    # where, not minimum: a NaN stays one
    gate = tl.where(gate > limit, limit, gate)
    return gate, tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))


@jit
def gate_forward_kernel(
    X, W, BIAS, Z, L, PERM, MAP, OUT, TILES, NB, TOP, H, I, row_x, w_e, w_n, w_k, l_e, l_n, l_k, alpha, limit, offset,
    KIND: tl.constexpr, CLAMP: tl.constexpr, HAS_BIAS: tl.constexpr, RANK: tl.constexpr, PAIRED: tl.constexpr,
    EVEN: tl.constexpr, PRECISE: tl.constexpr, GROUP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """OUT (S, I): act(gate) * up of the sorted rows."""
    tile, block = placed(tl.program_id(0), TILES, NB, GROUP)  # pyright: ignore
    first, last = tl.load(MAP + tile * 3 + 1), tl.load(MAP + tile * 3 + 2)
    if first < last:
        e, n0 = tl.load(MAP + tile * 3).to(tl.int64), block * BN
        r = first + tl.arange(0, BM)
        live = r < last
        token = (tl.load(PERM + r, mask=live, other=0) // TOP).to(tl.int64)
        r = tl.where(live, r, first).to(tl.int64)
        gate, up = _gate_and_up(
            X, W, BIAS, Z, L, e, r, token, n0, H, I, row_x, w_e, w_n, w_k, l_e, l_n, l_k,
            HAS_BIAS, RANK, PAIRED, EVEN, PRECISE, BM, BN, BK, BR,
        )  # fmt: skip
        gate, up = gate.to(tl.float32), up.to(tl.float32)
        if CLAMP:
            gate, up = _clamped(gate, up, limit)
        h = activate(gate, alpha, KIND) * (up + offset)
        cols = n0 + tl.arange(0, BN)
        tl.store(OUT + r[:, None] * I + cols[None, :], h, mask=live[:, None] & (cols[None, :] < I))


@jit
def gate_backward_kernel(
    X, W, BIAS, Z, L, D, WD, ZD, LD, WEIGHT, PERM, MAP, DGU, HIDDEN, PART, S, TILES, NB, TOP, H, I,
    row_x, row_d, w_e, w_n, w_k, l_e, l_n, l_k, d_e, d_n, d_k, m_e, m_n, m_k, alpha, limit, offset,
    KIND: tl.constexpr, CLAMP: tl.constexpr, HAS_BIAS: tl.constexpr, RANK: tl.constexpr, RANK_D: tl.constexpr,
    PAIRED: tl.constexpr, NEED_H: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr, PRECISE: tl.constexpr,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """DGU (S, 2I), HIDDEN (S, I) if wanted, PART (NB, S): shares of the routing weights' gradients, in token order."""
    tile, block = placed(tl.program_id(0), TILES, NB, GROUP)  # pyright: ignore
    first, last = tl.load(MAP + tile * 3 + 1), tl.load(MAP + tile * 3 + 2)
    if first < last:
        e, n0 = tl.load(MAP + tile * 3).to(tl.int64), block * BN
        r = first + tl.arange(0, BM)
        live = r < last
        place = tl.load(PERM + r, mask=live, other=0)
        token = (place // TOP).to(tl.int64)
        weight = tl.load(WEIGHT + place, mask=live, other=0.0).to(tl.float32)
        r = tl.where(live, r, first).to(tl.int64)
        gate, up = _gate_and_up(
            X, W, BIAS, Z, L, e, r, token, n0, H, I, row_x, w_e, w_n, w_k, l_e, l_n, l_k,
            HAS_BIAS, RANK, PAIRED, EVEN, PRECISE, BM, BN, BK, BR,
        )  # fmt: skip
        cols = n0 + tl.arange(0, BN)
        inside = cols < I
        # a column out of bounds is read as the first; where there is none, reads are known to be contiguous
        safe = (cols if WHOLE else tl.where(inside, cols, 0)).to(tl.int64)
        dh = tl.zeros((BM, BN), dtype=tl.float32)
        dh = product(dh, D, WD + e * d_e, token, safe, H, row_d, 1, d_k, d_n, EVEN, PRECISE, BK)
        if RANK_D:
            dh = product(dh, ZD, LD + e * m_e, r, safe, RANK_D, RANK_D, 1, m_k, m_n, RANK_D % BR == 0, PRECISE, BR)
        g, u = gate.to(tl.float32), up.to(tl.float32)
        inside_g, inside_u = g <= limit, (u <= limit) & (u >= -limit)
        if CLAMP:
            g, u = _clamped(g, u, limit)
        value, slope = activate_grad(g, alpha, KIND)
        u += offset
        mask = live[:, None] & inside[None, :]
        h = tl.where(inside[None, :], value * u, 0.0)
        tl.store(PART + block.to(tl.int64) * S + place, tl.sum(dh * h, 1), mask=live)
        if NEED_H:
            tl.store(HIDDEN + r[:, None] * I + cols[None, :], h, mask=mask)
        dh = dh * weight[:, None]
        dg, du = dh * slope * u, dh * value
        if CLAMP:
            dg, du = tl.where(inside_g, dg, 0.0), tl.where(inside_u, du, 0.0)
        row = DGU + r[:, None] * (2 * I)
        if PAIRED:
            both = n0 * 2 + tl.arange(0, 2 * BN)
            tl.store(row + both[None, :], tl.interleave(dg, du), mask=live[:, None] & (both[None, :] < 2 * I))
        else:
            tl.store(row + cols[None, :], dg, mask=mask)
            tl.store(row + I + cols[None, :], du, mask=mask)
