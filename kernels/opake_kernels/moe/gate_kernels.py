"""The gated half of the experts as two kernels: gate and up with what follows them, and what comes back through them.

Forward reads the token of each row in place (no gathered copy of x) and writes the activation only, or, for backward,
gate and up. A tile has rows of one expert only, and each row is a product of its own, whatever its neighbours hold.
Backward is element-wise: it turns the gradient of the activation into those of gate and up, which take the place of
gate and up in memory.
"""

from __future__ import annotations

from opake_kernels.activations import activate, activate_grad
from opake_kernels.launch import jit, tl

__all__ = ["described", "gate_backward_kernel", "gate_forward_kernel", "placed", "product"]


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
def described(
    acc, A, DA, DW, rows, first, base, n0, K, row_a, GATHER: tl.constexpr, TURNED: tl.constexpr, BK: tl.constexpr
):
    """acc += A[rows] @ W_e through descriptors: whole tiles travel by themselves. W_e begins at row `base` of DW.

    TURNED: DW holds (E * N, K), else (E * K, N). What lies beyond an expert's rows of A is computed and not used.
    """
    a = A + rows[:, None] * row_a + tl.arange(0, BK)[None, :]
    for k in range(0, K, BK):
        if GATHER:
            left = tl.load(a)
            a += BK
        else:
            left = DA.load([first, k])
        right = DW.load([base + n0, k]).T if TURNED else DW.load([base + k, n0])
        acc = tl.dot(left, right, acc)
    return acc


@jit
def _described_gate(
    X, DW, token, e, n0, H, I, row_x, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """gate and up of a tile through a descriptor of (E * 2I, H)."""
    gate, up = tl.zeros((BM, BN), dtype=tl.float32), tl.zeros((BM, BN), dtype=tl.float32)
    x = X + token[:, None] * row_x + tl.arange(0, BK)[None, :]
    row = e * 2 * I + n0
    for k in range(0, H, BK):
        left = tl.load(x)
        x += BK
        gate = tl.dot(left, DW.load([row, k]).T, gate)
        up = tl.dot(left, DW.load([row + I, k]).T, up)
    return gate, up


@jit
def _clamped(gate, up, limit):
    # where, not minimum: a NaN stays one
    gate = tl.where(gate > limit, limit, gate)
    return gate, tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))


@jit
def _columns(n0, I, PAIRED: tl.constexpr, BN: tl.constexpr):
    """Columns of a tile of width 2 BN in which gate and up alternate, in a matrix of width 2I; and which are inside."""
    j = tl.arange(0, 2 * BN)
    cols = n0 * 2 + j if PAIRED else (j % 2) * I + n0 + j // 2
    return cols, n0 + j // 2 < I


@jit
def gate_forward_kernel(
    X, W, DW, BIAS, Z, L, PERM, MAP, OUT, TILES, NB, TOP, H, I, row_x, w_e, w_n, w_k, l_e, l_n, l_k,
    alpha, limit, offset,
    KIND: tl.constexpr, CLAMP: tl.constexpr, HAS_BIAS: tl.constexpr, RANK: tl.constexpr, PAIRED: tl.constexpr,
    ACTIVE: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr, TMA: tl.constexpr, PRECISE: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """OUT (S, I): act(gate) * up of the sorted rows; or OUT (S, 2I): gate and up, laid out as the weights are."""
    tile, block = placed(tl.program_id(0), TILES, NB, GROUP)  # pyright: ignore
    first, last = tl.load(MAP + tile * 3 + 1), tl.load(MAP + tile * 3 + 2)
    if first < last:
        e, n0 = tl.load(MAP + tile * 3).to(tl.int64), block * BN
        r = first + tl.arange(0, BM)
        live = r < last
        token = (tl.load(PERM + r, mask=live, other=0) // TOP).to(tl.int64)
        r = tl.where(live, r, first).to(tl.int64)
        cols, inside = _columns(n0, I, PAIRED, BN)  # pyright: ignore
        # a column out of bounds is read as the first; where there is none, reads may be known to be contiguous
        safe = (cols if WHOLE else tl.where(inside, cols, 0)).to(tl.int64)
        if TMA:
            gate, up = _described_gate(X, DW, token, e.to(tl.int32), n0, H, I, row_x, BM, BN, BK)  # pyright: ignore
            gate, up = gate.to(X.dtype.element_ty), up.to(X.dtype.element_ty)
        else:
            acc = tl.zeros((BM, 2 * BN), dtype=tl.float32)
            acc = product(acc, X, W + e * w_e, token, safe, H, row_x, 1, w_k, w_n, EVEN, PRECISE, BK)
            if RANK:
                acc = product(acc, Z, L + e * l_e, r, safe, RANK, RANK, 1, l_k, l_n, RANK % BR == 0, PRECISE, BR)
            if HAS_BIAS:
                acc += tl.load(BIAS + e * 2 * I + safe)[None, :].to(tl.float32)
            # rounded as a product of the vendor's library is
            gate, up = tl.split(tl.reshape(acc.to(X.dtype.element_ty), (BM, BN, 2)))
        out = n0 + tl.arange(0, BN)
        mask = live[:, None] & (out[None, :] < I)
        if ACTIVE:
            gate, up = gate.to(tl.float32), up.to(tl.float32)
            if CLAMP:
                gate, up = _clamped(gate, up, limit)
            tl.store(OUT + r[:, None] * I + out[None, :], activate(gate, alpha, KIND) * (up + offset), mask=mask)
        elif PAIRED:
            both = OUT + r[:, None] * (2 * I) + cols[None, :]
            tl.store(both, tl.interleave(gate, up), mask=live[:, None] & inside[None, :])
        else:
            tl.store(OUT + r[:, None] * (2 * I) + out[None, :], gate, mask=mask)
            tl.store(OUT + r[:, None] * (2 * I) + I + out[None, :], up, mask=mask)


@jit
def gate_backward_kernel(
    DH, GU, HIDDEN, WEIGHT, DW, PERM, I, alpha, limit, within, offset,
    KIND: tl.constexpr, CLAMP: tl.constexpr, PAIRED: tl.constexpr, NEED_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row: GU (S, 2I) becomes its gradient for WEIGHT * DH (S, I); DW: DH . h, in slot order; HIDDEN (S, I): h."""
    r = tl.program_id(0).to(tl.int64)
    place = tl.load(PERM + r)
    weight = tl.load(WEIGHT + place).to(tl.float32)
    row, total = GU + r * (2 * I), tl.zeros((BLOCK,), dtype=tl.float32)
    for n0 in range(0, I, BLOCK):
        cols, both = n0 + tl.arange(0, BLOCK), n0 * 2 + tl.arange(0, 2 * BLOCK)
        mask = cols < I
        dh = tl.load(DH + r * I + cols, mask=mask, other=0.0).to(tl.float32)
        if PAIRED:
            # one wide read, then split in registers
            pair = tl.load(row + both, mask=both < 2 * I, other=0.0).to(tl.float32)
            g, u = tl.split(tl.reshape(pair, (BLOCK, 2)))
        else:
            g = tl.load(row + cols, mask=mask, other=0.0).to(tl.float32)
            u = tl.load(row + I + cols, mask=mask, other=0.0).to(tl.float32)
        inside_g, inside_u = g <= within, (u <= within) & (u >= -within)
        if CLAMP:
            g, u = _clamped(g, u, limit)
        value, slope = activate_grad(g, alpha, KIND)
        u += offset
        h = tl.where(mask, value * u, 0.0)
        total += dh * h
        if NEED_H:
            tl.store(HIDDEN + r * I + cols, h, mask=mask)
        dg, du = weight * dh * slope * u, weight * dh * value
        if CLAMP:
            dg, du = tl.where(inside_g, dg, 0.0), tl.where(inside_u, du, 0.0)
        if PAIRED:
            tl.store(row + both, tl.interleave(dg, du), mask=both < 2 * I)
        else:
            tl.store(row + cols, dg, mask=mask)
            tl.store(row + I + cols, du, mask=mask)
    tl.store(DW + place, tl.sum(total, 0))
