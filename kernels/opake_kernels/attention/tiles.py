"""Triton kernel of attention, forward: a tile of queries meets the keys it may see, tile by tile.

Softmax is accumulated online (Dao 2023, "FlashAttention-2"), in fp32 and in powers of two. Of each row the largest
score and the logarithm of the sum are kept apart, so that a row whose scores are all the same huge negative number (an
additive mask of eager attention) has its uniform weights in backward too. Windows and causality bound the loop over
keys, so keys that nobody sees are not read. What a query sees, how a score is capped and how it is masked is one
function for forward and backward. Leaves out dropout and a gradient of the mask.
"""

from __future__ import annotations

from opake_kernels.launch import jit, tl
from opake_kernels.precise import precise_tanh

__all__ = ["attention_forward_kernel", "capped", "keys_seen", "load_rows", "seen_scores"]

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
# what an additive mask may at most take away: its product with log2(e) is finite, and swallows any score
LOWEST: tl.constexpr = tl.constexpr(-1e30)


@jit
def load_rows(at, row, rows, column, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, EDGE: tl.constexpr):
    """A tile of rows, zero beyond the last row (looked for where EDGE) and beyond the last column."""
    if EDGE and COLUMNS == BLOCK:
        tile = tl.load(at, (row < rows)[:, None], 0.0)
    elif EDGE:
        tile = tl.load(at, (row < rows)[:, None] & (column < COLUMNS)[None, :], 0.0)
    elif COLUMNS == BLOCK:
        tile = tl.load(at)
    else:
        tile = tl.load(at, (column < COLUMNS)[None, :], 0.0)
    return tile


@jit
def capped(score, scale, softcap, SOFTCAP: tl.constexpr, PRECISE: tl.constexpr):
    """(score in powers of two, derivative of the cap) of a product q k: softcap * tanh(scale * score / softcap)."""
    if SOFTCAP:
        x = score * (scale / softcap)
        if PRECISE:  # noqa: SIM108 - the compiler's test
            y = precise_tanh(x)
        else:
            y = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))
        score = y * (softcap * LOG2E)
        slope = 1.0 - y * y
    else:
        score = score * (scale * LOG2E)
        slope = score
    return score, slope


@jit
def seen_scores(
    score, t, s, M, m_t, m_s, T, S, ahead, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Scores with the mask on them, -inf where query t may not see key s; t and s broadcast to the tile.

    MASK: 0 none, 1 boolean, 2 additive. ahead: how many keys lie before the first query, S - T. EDGE: whether the
    tile may hold pairs that causality, the window or the end of the keys forbids.
    """
    if MASK > 0:
        inside = (t < T) & (s < S)
        at = M + t.to(tl.int64) * m_t + s.to(tl.int64) * m_s
    if MASK == 1:
        score = tl.where(tl.load(at, inside, 0) != 0, score, float("-inf"))
    if MASK == 2:
        bias = tl.load(at, inside, 0.0).to(tl.float32)
        # a finite bias stays finite; -inf forbids
        bias = tl.where(bias == float("-inf"), bias, tl.maximum(bias, LOWEST) * LOG2E)
        score = score + bias
    if EDGE:
        live = s < S
        if CAUSAL:
            live = live & (s <= t + ahead)
        if WINDOW:
            live = live & (s > t + ahead - window)
        score = tl.where(live, score, float("-inf"))
    return score


@jit
def keys_seen(first, ahead, window, S, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """(begin, whole, ragged, end): tiles of keys that a tile of queries meets; between whole and ragged it sees all."""
    begin, end = first * 0, first * 0 + S
    whole = begin
    if WINDOW:
        begin = tl.maximum(first + ahead - window + 1, 0) // BN * BN
        whole = (tl.maximum(first + BM + ahead - window, 0) + BN - 1) // BN * BN
    ragged = end // BN * BN
    if CAUSAL:
        end = tl.minimum(end, first + BM + ahead)
        ragged = tl.minimum(ragged, tl.maximum(first + ahead + 1, 0) // BN * BN)
    ragged = tl.maximum(ragged, begin)
    whole = tl.minimum(tl.maximum(whole, begin), ragged)
    return begin, whole, ragged, end


@jit(do_not_specialize=["T", "S", "ahead", "window"])
def attention_forward_kernel(
    Q, K, V, M, SINKS, OUT, STAT, T, S, ahead, window, scale, softcap, heads, batch,
    q_a, q_n, q_t, k_a, k_n, k_s, v_a, v_n, v_s, m_a, m_n, m_t, m_s, o_a, o_n, o_t, sinks_g,
    D: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, MASK: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BM
    head = tl.program_id(1) % heads
    a = (tl.program_id(1) // heads).to(tl.int64)
    n, kv = head.to(tl.int64), (head // GROUP).to(tl.int64)
    t, d, e = first + tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BV)
    Q += a * q_a + n * q_n
    K += a * k_a + kv * k_n
    V += a * v_a + kv * v_n
    if MASK > 0:
        M += a * m_a + n * m_n
    q = tl.load(Q + t.to(tl.int64)[:, None] * q_t + d[None, :], (t < T)[:, None] & (d < D)[None, :], 0.0)
    high = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    if HAS_SINKS:
        # a sink is one more key with nothing behind it
        sink = tl.load(SINKS + (a // batch) * sinks_g + n).to(tl.float32) * LOG2E
        high, total = total + sink, total + 1.0
    acc = tl.zeros((BM, BV), tl.float32)
    begin, whole, ragged, end = keys_seen(first, ahead, window, S, CAUSAL, WINDOW, BM, BN)
    # the near edge of the window, then tiles seen whole, then the diagonal and the last keys; one loop for all in fp32,
    # whose products are long code
    for part in tl.static_range(2 if PRECISE else 0 if WINDOW else 1, 3):
        low = begin if part == 0 or PRECISE else whole if part == 1 else ragged
        high_end = whole if part == 0 else ragged if part == 1 else end
        for start in range(low, high_end, BN):
            s = start + tl.arange(0, BN)
            at = s.to(tl.int64)[:, None]
            k = load_rows(K + at * k_s + d[None, :], s, S, d, D, BD, part != 1)
            score, _ = capped(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, softcap, SOFTCAP, PRECISE)
            score = seen_scores(
                score, t[:, None], s[None, :], M, m_t, m_s, T, S, ahead, window, CAUSAL, WINDOW, MASK, part != 1
            )  # fmt: skip
            above = tl.maximum(high, tl.max(score, 1))
            # a row that has seen nothing yet stays without NaN
            base = tl.where(above == float("-inf"), 0.0, above)
            p = tl.exp2(score - base[:, None])
            shrink = tl.exp2(high - base)
            total = total * shrink + tl.sum(p, 1)
            v = load_rows(V + at * v_s + e[None, :], s, S, e, DV, BV, part != 1)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
            high = above
    blind = total == 0.0
    total = tl.where(blind, 1.0, total)
    OUT += a * o_a + n * o_n
    out = acc / total[:, None]
    tl.store(OUT + t.to(tl.int64)[:, None] * o_t + e[None, :], out, (t < T)[:, None] & (e < DV)[None, :])
    STAT += (a * heads + n) * 2 * T
    tl.store(STAT + t, tl.where(blind, 0.0, high), t < T)
    tl.store(STAT + T + t, tl.log2(total), t < T)
