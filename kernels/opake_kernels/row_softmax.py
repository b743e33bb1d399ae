"""Row-wise softmax over a vocabulary, as device code: scale, soft cap, log of the sum of exponentials, tiles of a row.

Shared by cross_entropy.py and selective_log_softmax.py. Each thread keeps its own running maximum and sum over the
columns that it reads and they are joined once, after the row: no barrier inside the loop, and one rescaling for every W
exponentials. Rows may start at any address: tiles begin at the aligned address before the row, so that an odd
vocabulary (50257) is read 16 bytes at a time as well. Leaves out reduction, and which labels count.
"""

from __future__ import annotations

import torch

from .launch import jit, next_power_of_2, tl
from .precise import precise_exp, precise_log, precise_tanh

__all__ = [
    "aligned_start",
    "cap_scale",
    "cap_scale_grad",
    "finite_or_zero",
    "grad_tile",
    "row_log_softmax_parts",
    "row_loss",
    "row_tile",
    "softmax_grad",
]


@jit
def cap_scale(x, scale, cap, CAP: tl.constexpr):
    """scale * x, then cap * tanh(. / cap) (soft cap: Gemma 2, arXiv 2408.00118)."""
    z = x.to(tl.float32) * scale
    if CAP:
        # 16-bit logits do not carry what the precise form adds
        z = cap * (precise_tanh(z / cap) if x.dtype == tl.float32 else 2.0 * tl.sigmoid(2.0 * z / cap) - 1.0)
    return z


@jit
def cap_scale_grad(x, scale, cap, CAP: tl.constexpr):
    """Derivative of `cap_scale` by x."""
    slope = scale
    if CAP:
        # 1 - tanh^2 without its cancellation near the cap
        y = -2.0 * tl.abs(x.to(tl.float32) * scale / cap)
        e = precise_exp(y) if x.dtype == tl.float32 else tl.exp(y)
        slope = scale * 4.0 * e / ((1.0 + e) * (1.0 + e))
    return slope


@jit
def finite_or_zero(z):
    """z, or 0 for a logit of minus infinity, from which no differences are taken."""
    return tl.where(z == -float("inf"), 0.0, z)


@jit
def aligned_start(start, W: tl.constexpr):
    """(aligned, shift): the multiple of W at or before element `start`, and how far before."""
    shift = start % W
    return tl.multiple_of(start - shift, W), shift


@jit
def _accumulate(
    m, s, total, x, inside, scale, cap, origin, CAP: tl.constexpr, TOTAL: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    z = cap_scale(x, scale, cap, CAP)
    if TOTAL:
        total += tl.sum(tl.where(inside, z - origin, 0.0) if MASKED else z - origin, 1)
    if MASKED:
        z = tl.where(inside, z, -float("inf"))
    new = tl.maximum(m, tl.max(z, 1))
    # a run of -inf logits must not give inf - inf
    safe = tl.where(new == -float("inf"), 0.0, new)
    if x.dtype == tl.float32:
        s = s * precise_exp(m - safe) + tl.sum(precise_exp(z - safe[:, None]), 1)
    else:
        s = s * tl.exp(m - safe) + tl.sum(tl.exp(z - safe[:, None]), 1)
    return new, s, total


@jit
def row_log_softmax_parts(
    L, start, V, scale, cap, CAP: tl.constexpr, TOTAL: tl.constexpr, T: tl.constexpr, W: tl.constexpr, origin=0.0
):  # fmt: skip
    """(top, log_sum, total) of the V scaled and capped logits from element `start` of L; the total only with TOTAL.

    logsumexp is top + log_sum; apart they give the loss as (top - z) + log_sum, which keeps its digits where z is much
    larger than the loss. For the same reason the total is that of z - origin.
    """
    aligned, shift = aligned_start(start, W)  # pyright: ignore
    base = L + aligned
    lane = tl.arange(0, T)[:, None] * W + tl.arange(0, W)[None, :]
    # columns of the aligned row are [shift, end)
    end = V + shift
    m = tl.full((T,), -float("inf"), tl.float32)
    s = tl.zeros((T,), tl.float32)
    total = tl.zeros((T,), tl.float32)

    inside = (lane >= shift) & (lane < end)
    x = tl.load(base + lane, mask=inside, other=0.0)
    m, s, total = _accumulate(m, s, total, x, inside, scale, cap, origin, CAP, TOTAL, True)
    for at in range(T * W, end - T * W + 1, T * W):
        x = tl.load(base + at + lane)
        m, s, total = _accumulate(m, s, total, x, inside, scale, cap, origin, CAP, TOTAL, False)
    last = end // (T * W) * (T * W)
    if last > 0:
        inside = lane < end - last
        x = tl.load(base + last + lane, mask=inside, other=0.0)
        m, s, total = _accumulate(m, s, total, x, inside, scale, cap, origin, CAP, TOTAL, True)

    top = tl.max(m, 0)
    safe = tl.where(top == -float("inf"), 0.0, top)
    return safe, precise_log(tl.sum(s * precise_exp(m - safe), 0)), tl.sum(total, 0)


@jit
def row_loss(
    L, start, y, V, scale, cap, smoothing,
    CAP: tl.constexpr, SMOOTH: tl.constexpr, T: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """(valid, loss, top, log_sum): whether y is a column, the loss for it (NaN if not), the logsumexp in parts."""
    valid = (y >= 0) & (y < V)
    z = cap_scale(tl.load(L + start + tl.where(valid, y, 0)), scale, cap, CAP)
    origin = finite_or_zero(z)  # pyright: ignore
    top, log_sum, total = row_log_softmax_parts(  # pyright: ignore
        L, start, V, scale, cap, CAP, SMOOTH, T, W, origin
    )
    loss = top - z
    if SMOOTH:
        loss -= smoothing * (total / V)
    return valid, tl.where(valid, loss + log_sum, float("nan")), top, log_sum


@jit
def softmax_grad(
    x, lse, g, hit, scale, cap, smoothing, V,
    CAP: tl.constexpr, SMOOTH: tl.constexpr, PRECISE: tl.constexpr, log_sum=0.0,
):  # fmt: skip
    """g times the derivative of the cross-entropy of a row by its logits x; `hit` marks the label's column.

    The logsumexp is lse + log_sum: apart, as row_log_softmax_parts gives them, nothing is lost to a common offset.
    PRECISE: the exponential of fp32 logits to a unit in the last place, for a gradient that is summed over tokens.
    """
    y = (cap_scale(x, scale, cap, CAP) - lse) - log_sum
    # the fast exp loses as many units in the last place as y has binary digits before the point
    d = precise_exp(y) if PRECISE and x.dtype == tl.float32 else tl.exp(y)
    if SMOOTH:
        d = d - smoothing / V
        d = tl.where(hit, d - (1.0 - smoothing), d)
    else:
        d = tl.where(hit, d - 1.0, d)
    return d * g * cap_scale_grad(x, scale, cap, CAP)


def row_tile(logits: torch.Tensor) -> dict[str, int]:
    """T, W and num_warps for the rows of `logits`: W columns are 16 bytes, T of them make a tile."""
    W = 16 // logits.element_size()
    T = min(512, max(32, next_power_of_2(logits.shape[-1] // W)))
    return {"T": T, "W": W, "num_warps": max(T // 64, 1)}


def grad_tile(logits: torch.Tensor) -> dict[str, int]:
    """BLOCK, W, TILES a program and num_warps for writing the gradient of `logits`; tiles begin on multiples of W."""
    W = 16 // logits.element_size()
    V = logits.shape[-1]
    block = min(2048, max(256, next_power_of_2(V + W - 1)))
    # a run of tiles hides the reads of label and logsumexp; few rows are split so that every multiprocessor has work
    tiles = 4 if logits.numel() >= 2**24 else 1
    return {"BLOCK": block, "W": W, "TILES": tiles, "num_warps": max(block // 512, 1)}
