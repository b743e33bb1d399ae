"""Triton kernels of attention, backward: one for the queries' gradient, one for the keys' and values'.

Weights are computed again from the kept statistics. A tile of keys goes through all query heads that share it, so the
gradients of grouped keys need neither atomics nor copies, and are the same bits every time. Leaves out the gradients
of sinks (sums over rows of what `delta` holds) and of the mask.
"""

from __future__ import annotations

from opake_kernels.launch import jit, tl

from .tiles import capped, keys_seen, load_rows, seen_scores

__all__ = ["delta_kernel", "keys_kernel", "queries_kernel"]


@jit(do_not_specialize=["T"])
def delta_kernel(
    GO, OUT, DELTA, T, heads, g_a, g_n, g_t, o_a, o_n, o_t,
    DV: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """delta = the row sums of gradient times output."""
    t, e = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BV)
    a, n = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    live = (t < T)[:, None] & (e < DV)[None, :]
    rows = t.to(tl.int64)[:, None]
    go = tl.load(GO + a * g_a + n * g_n + rows * g_t + e[None, :], live, 0.0).to(tl.float32)
    out = tl.load(OUT + a * o_a + n * o_n + rows * o_t + e[None, :], live, 0.0).to(tl.float32)
    tl.store(DELTA + (a * heads + n) * T + t, tl.sum(go * out, 1), t < T)


@jit(do_not_specialize=["T", "S", "ahead", "window"])
def queries_kernel(
    GO, Q, K, V, M, STAT, DELTA, DQ, T, S, ahead, window, scale, softcap, heads,
    g_a, g_n, g_t, q_a, q_n, q_t, k_a, k_n, k_s, v_a, v_n, v_s, m_a, m_n, m_t, m_s, d_a, d_n, d_t,
    D: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, MASK: tl.constexpr, PRECISE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of queries."""
    first = tl.program_id(0) * BM
    head = tl.program_id(1) % heads
    a = (tl.program_id(1) // heads).to(tl.int64)
    n, kv = head.to(tl.int64), (head // GROUP).to(tl.int64)
    t, d, e = first + tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BV)
    rows, row = t.to(tl.int64)[:, None], (a * heads + n) * T
    K += a * k_a + kv * k_n
    V += a * v_a + kv * v_n
    if MASK > 0:
        M += a * m_a + n * m_n
    wide, tall = (t < T)[:, None] & (d < D)[None, :], (t < T)[:, None] & (e < DV)[None, :]
    q = tl.load(Q + a * q_a + n * q_n + rows * q_t + d[None, :], wide, 0.0)
    go = tl.load(GO + a * g_a + n * g_n + rows * g_t + e[None, :], tall, 0.0)
    high = tl.load(STAT + 2 * row + t, t < T, 0.0)
    log_sum = tl.load(STAT + 2 * row + T + t, t < T, 0.0)
    delta = tl.load(DELTA + row + t, t < T, 0.0)
    if not (PRECISE or MASK == 2):
        high = high + log_sum
    acc = tl.zeros((BM, BD), tl.float32)
    begin, whole, ragged, end = keys_seen(first, ahead, window, S, CAUSAL, WINDOW, BM, BN)
    for part in tl.static_range(2 if PRECISE else 0 if WINDOW else 1, 3):
        low = begin if part == 0 or PRECISE else whole if part == 1 else ragged
        high_end = whole if part == 0 else ragged if part == 1 else end
        for start in range(low, high_end, BN):
            s = start + tl.arange(0, BN)
            at = s.to(tl.int64)[:, None]
            k = load_rows(K + at * k_s + d[None, :], s, S, d, D, BD, part != 1)
            v = load_rows(V + at * v_s + e[None, :], s, S, e, DV, BV, part != 1)
            score, slope = capped(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, softcap, SOFTCAP, PRECISE)
            score = seen_scores(
                score, t[:, None], s[None, :], M, m_t, m_s, T, S, ahead, window, CAUSAL, WINDOW, MASK, part != 1
            )  # fmt: skip
            score = score - high[:, None]
            if PRECISE or MASK == 2:
                # one after the other: next to a huge `high` the other would be lost
                score = score - log_sum[:, None]
            p = tl.exp2(score)
            dp = tl.dot(go, tl.trans(v), input_precision="ieee")
            ds = p * (dp - delta[:, None])
            if SOFTCAP:
                ds = ds * slope
            acc = tl.dot(ds.to(k.dtype), k, acc, input_precision="ieee")
    tl.store(DQ + a * d_a + n * d_n + rows * d_t + d[None, :], acc * scale, wide)


@jit(do_not_specialize=["T", "S", "ahead", "window"])
def keys_kernel(
    GO, Q, K, V, M, STAT, DELTA, DK, DV_OUT, T, S, ahead, window, scale, softcap, heads,
    g_a, g_n, g_t, q_a, q_n, q_t, k_a, k_n, k_s, v_a, v_n, v_s, m_a, m_n, m_t, m_s, dk_a, dk_n, dk_s, dv_a, dv_n, dv_s,
    D: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, MASK: tl.constexpr, PRECISE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of keys, over all query heads that share it; tiles are transposed, keys first."""
    first = tl.program_id(0) * BN
    kv_heads = heads // GROUP
    a = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv = (tl.program_id(1) % kv_heads).to(tl.int64)
    s, d, e = first + tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BV)
    at = s.to(tl.int64)[:, None]
    wide, tall = (s < S)[:, None] & (d < D)[None, :], (s < S)[:, None] & (e < DV)[None, :]
    k = tl.load(K + a * k_a + kv * k_n + at * k_s + d[None, :], wide, 0.0)
    v = tl.load(V + a * v_a + kv * v_n + at * v_s + e[None, :], tall, 0.0)
    dk, dv = tl.zeros((BN, BD), tl.float32), tl.zeros((BN, BV), tl.float32)
    # one loop: told apart by what they see, as above, the tiles of queries would take more registers than there are
    begin, end = 0, T
    if CAUSAL:
        begin = tl.maximum(first - ahead, 0) // BM * BM
    if WINDOW:
        end = tl.maximum(tl.minimum(T, first + BN - 1 + window - ahead), 0)
    for member in range(GROUP):
        n = kv * GROUP + member
        row = (a * heads + n) * T
        of_head = M
        if MASK > 0:
            of_head = M + a * m_a + n * m_n
        for start in range(begin, end, BM):
            t = start + tl.arange(0, BM)
            rows = t.to(tl.int64)[:, None]
            q = tl.load(Q + a * q_a + n * q_n + rows * q_t + d[None, :], (t < T)[:, None] & (d < D)[None, :], 0.0)
            go = tl.load(GO + a * g_a + n * g_n + rows * g_t + e[None, :], (t < T)[:, None] & (e < DV)[None, :], 0.0)
            high = tl.load(STAT + 2 * row + t, t < T, 0.0)
            log_sum = tl.load(STAT + 2 * row + T + t, t < T, 0.0)
            delta = tl.load(DELTA + row + t, t < T, 0.0)
            score, slope = capped(tl.dot(k, tl.trans(q), input_precision="ieee"), scale, softcap, SOFTCAP, PRECISE)
            score = seen_scores(
                score, t[None, :], s[:, None], of_head, m_t, m_s, T, S, ahead, window, CAUSAL, WINDOW, MASK, True
            )  # fmt: skip
            score = score - (high[None, :] if PRECISE or MASK == 2 else (high + log_sum)[None, :])
            if PRECISE or MASK == 2:
                score = score - log_sum[None, :]
            p = tl.exp2(score)
            dv = tl.dot(p.to(go.dtype), go, dv, input_precision="ieee")
            dp = tl.dot(v, tl.trans(go), input_precision="ieee")
            ds = p * (dp - delta[None, :])
            if SOFTCAP:
                ds = ds * slope
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    tl.store(DK + a * dk_a + kv * dk_n + at * dk_s + d[None, :], dk * scale, wide)
    tl.store(DV_OUT + a * dv_a + kv * dv_n + at * dv_s + e[None, :], dv, tall)
