"""Products of sorted rows as kernels: with the matrix of each row's expert, within each segment, and their sums.

Tiles follow a map that is made on the device from the ends of the experts' rows; the grid is the most tiles that there
can be, so no count ever travels to the host. Everything is summed in fp32 in a fixed order: no atomics.
"""

from __future__ import annotations

from opake_kernels.launch import jit, tl

from .gate_kernels import described, placed, product

__all__ = ["combine_kernel", "map_kernel", "rows_kernel", "segments_kernel"]


@jit
def map_kernel(ENDS, MAP, E, TILES, BM: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr):
    """MAP (TILES, 3): expert, first row and end of its rows, for each tile; an end of 0 is a tile of nothing."""
    e = tl.arange(0, EP)
    end = tl.load(ENDS + e, mask=e < E, other=0)
    start = tl.load(ENDS + e - 1, mask=(e > 0) & (e < E), other=0)
    tiles = (end - start + BM - 1) // BM
    last = tl.cumsum(tiles, 0)
    before = last - tiles
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    hit = (before[None, :] <= tile[:, None]) & (tile[:, None] < last[None, :])
    first = start[None, :] + (tile[:, None] - before[None, :]) * BM
    inside = tile < TILES
    tl.store(MAP + tile * 3, tl.sum(tl.where(hit, e[None, :], 0), 1), mask=inside)
    tl.store(MAP + tile * 3 + 1, tl.sum(tl.where(hit, first, 0), 1), mask=inside)
    tl.store(MAP + tile * 3 + 2, tl.sum(tl.where(hit, end[None, :], 0), 1), mask=inside)


@jit
def rows_kernel(
    A, W, DA, DW, Z, L, BIAS, WEIGHT, PERM, MAP, OUT, TILES, NB, TOP, K, N, row_a, w_e, w_n, w_k, l_e, l_n, l_k,
    row_out,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr, RANK: tl.constexpr,
    EVEN: tl.constexpr, WHOLE: tl.constexpr, TMA: tl.constexpr, TURNED: tl.constexpr, PRECISE: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """OUT = (A @ W_e + Z @ L_e + BIAS_e) * WEIGHT; A by token if GATHER, OUT in slot order if SCATTER."""
    tile, block = placed(tl.program_id(0), TILES, NB, GROUP)  # pyright: ignore
    first, last = tl.load(MAP + tile * 3 + 1), tl.load(MAP + tile * 3 + 2)
    if first < last:
        e = tl.load(MAP + tile * 3).to(tl.int64)
        r = first + tl.arange(0, BM)
        live = r < last
        place = r
        if GATHER or SCATTER or SCALED:
            place = tl.load(PERM + r, mask=live, other=0).to(tl.int32)
        r = tl.where(live, r, first).to(tl.int64)
        rows = (place // TOP).to(tl.int64) if GATHER else r
        cols = block * BN + tl.arange(0, BN)
        inside = cols < N
        # a column out of bounds is read as the first; where there is none, reads are known to be contiguous
        safe = (cols if WHOLE else tl.where(inside, cols, 0)).to(tl.int64)
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        if TMA:
            base = e.to(tl.int32) * (N if TURNED else K)
            acc = described(acc, A, DA, DW, rows, first, base, block * BN, K, row_a, GATHER, TURNED, BK)
        else:
            acc = product(acc, A, W + e * w_e, rows, safe, K, row_a, 1, w_k, w_n, EVEN, PRECISE, BK)
        if RANK:
            acc = product(acc, Z, L + e * l_e, r, safe, RANK, RANK, 1, l_k, l_n, RANK % BR == 0, PRECISE, BR)
        if HAS_BIAS:
            acc += tl.load(BIAS + e * N + safe)[None, :].to(tl.float32)
        if SCALED:
            acc *= tl.load(WEIGHT + place, mask=live, other=0.0).to(tl.float32)[:, None]
        to = place.to(tl.int64) if SCATTER else r
        tl.store(OUT + to[:, None] * row_out + cols[None, :], acc, mask=live[:, None] & inside[None, :])


@jit
def segments_kernel(
    P, Q, WEIGHT, PERM, ENDS, OUT, NM, NN, TOP, M, N, E, G, row_p, row_q,
    GATHER_P: tl.constexpr, GATHER_Q: tl.constexpr, SCALED: tl.constexpr, PRECISE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """OUT (G, E, M, N): P^T Q over the rows of each (expert, example); the rows of P weighted if SCALED."""
    program = tl.program_id(0)
    segment, place = program // (NM * NN), program % (NM * NN)
    start = tl.load(ENDS + segment - 1, mask=segment > 0, other=0)
    end = tl.load(ENDS + segment)
    m = place // NN * BM + tl.arange(0, BM)
    n = place % NN * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for r0 in range(start, end, BR):
        r = r0 + tl.arange(0, BR)
        live = r < end
        where = r
        if GATHER_P or GATHER_Q or SCALED:
            where = tl.load(PERM + r, mask=live, other=0).to(tl.int32)
        row_of_p = (where // TOP if GATHER_P else r).to(tl.int64)
        row_of_q = (where // TOP if GATHER_Q else r).to(tl.int64)
        p = tl.load(P + row_of_p[None, :] * row_p + m[:, None], mask=live[None, :] & (m[:, None] < M), other=0.0)
        q = tl.load(Q + row_of_q[:, None] * row_q + n[None, :], mask=live[:, None] & (n[None, :] < N), other=0.0)
        if SCALED:
            weight = tl.load(WEIGHT + where, mask=live, other=0.0).to(tl.float32)
            p = (p.to(tl.float32) * weight[None, :]).to(q.dtype)
        acc = tl.dot(p, q, acc, input_precision="ieee" if PRECISE else None)
    out = OUT + ((segment % G).to(tl.int64) * E + segment // G) * M * N
    at = m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(out + at, acc, mask=(m[:, None] < M) & (n[None, :] < N))


@jit
def combine_kernel(Y, OUT, H, NB, TOP: tl.constexpr, BLOCK: tl.constexpr):
    """OUT (T, H): the TOP rows of each token of Y (T * TOP, H), added in fp32."""
    program = tl.program_id(0)
    token, cols = (program // NB).to(tl.int64), program % NB * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(TOP):
        acc += tl.load(Y + (token * TOP + k) * H + cols, mask=cols < H, other=0.0).to(tl.float32)
    tl.store(OUT + token * H + cols, acc, mask=cols < H)
