"""Triton kernels of the cross-entropy over rows of logits; the op and its launches are cross_entropy.py.

One program a row forward, which leaves the loss and the logsumexp in two parts; one a group for the reduction; one for
a run of tiles backward. Rows may begin at any address (row_softmax.py). Leaves out strides other than those of rows.
"""

from __future__ import annotations

from .launch import jit, tl
from .row_softmax import aligned_start, row_loss, softmax_grad

__all__ = ["cross_entropy_bwd_kernel", "cross_entropy_fwd_kernel", "cross_entropy_reduce_kernel"]


@jit
def cross_entropy_fwd_kernel(
    L, Y, LOSS, LSE, V, inner, outer, step, ignore, scale, cap, smoothing,
    CAP: tl.constexpr, SMOOTH: tl.constexpr, T: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """One row a program: the loss of one token, and the two parts of its logsumexp."""
    row = tl.program_id(0).to(tl.int64)
    y = tl.load(Y + row)
    if y == ignore:
        tl.store(LOSS + row, 0.0)
        tl.store(LSE + row * 2 + tl.arange(0, 2), tl.zeros((2,), tl.float32))
    else:
        start = (row // inner) * outer + (row % inner) * step
        _, loss, top, log_sum = row_loss(  # pyright: ignore
            L, start, y, V, scale, cap, smoothing, CAP, SMOOTH, T, W
        )
        tl.store(LOSS + row, loss)
        tl.store(LSE + row * 2, top)
        tl.store(LSE + row * 2 + 1, log_sum)


@jit(do_not_specialize=["R"])
def cross_entropy_reduce_kernel(LOSS, Y, OUT, WEIGHT, R, ignore, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """One group a program: the sum or mean of its R losses, and the weight each token had in it."""
    group = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, R, BLOCK):
        token = start + tl.arange(0, BLOCK)
        total += tl.load(LOSS + group * R + token, mask=token < R, other=0.0)
        if MEAN:
            counted = tl.load(Y + group * R + token, mask=token < R, other=ignore) != ignore
            count += counted.to(tl.int32)
    weight = 1.0
    if MEAN:
        weight = 1.0 / tl.maximum(tl.sum(count, 0), 1).to(tl.float32)
    tl.store(WEIGHT + group, weight)
    tl.store(OUT + group, tl.sum(total, 0) * weight)


@jit(do_not_specialize=["R"])
def cross_entropy_bwd_kernel(
    L, Y, LSE, G, WEIGHT, D, V, NB, R, inner, outer, step, ignore, scale, cap, smoothing,
    CAP: tl.constexpr, SMOOTH: tl.constexpr, REDUCED: tl.constexpr, DENSE: tl.constexpr,
    TILES: tl.constexpr, BLOCK: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """TILES tiles of one row a program, aligned in the gradient, and in the logits too where those are DENSE."""
    program = tl.program_id(0)
    row = (program // NB).to(tl.int64)
    aligned, shift = aligned_start(row * V, W)  # pyright: ignore
    y = tl.load(Y + row)
    lane = tl.arange(0, BLOCK)
    begin = (program % NB) * (TILES * BLOCK)
    # lanes of the aligned row that are columns: [shift, end)
    end = V + shift
    stop = tl.minimum(begin + TILES * BLOCK, end)
    if y == ignore:
        zero = tl.zeros((BLOCK,), D.dtype.element_ty)
        for at in range(begin, stop, BLOCK):
            # whole tiles need no mask, and without one an odd V is written 16 bytes at a time
            if (at >= shift) & (at + BLOCK <= end):
                tl.store(D + aligned + at + lane, zero)
            else:
                tl.store(D + aligned + at + lane, zero, mask=(lane >= shift - at) & (lane < end - at))
    else:
        top, log_sum = tl.load(LSE + row * 2), tl.load(LSE + row * 2 + 1)
        group = program // NB // R if REDUCED else row
        g = tl.load(G + group) * tl.load(WEIGHT + group) if REDUCED else tl.load(G + group)
        g = tl.where((y >= 0) & (y < V), g, float("nan"))
        label = y + shift
        from_row = (row // inner) * outer + (row % inner) * step - shift
        source = L + aligned if DENSE else L + from_row
        for at in range(begin, stop, BLOCK):
            out = D + aligned + at + lane
            hit = lane == (label - at).to(tl.int32)
            if (at >= shift) & (at + BLOCK <= end):
                x = tl.load(source + at + lane)
                tl.store(out, softmax_grad(x, top, g, hit, scale, cap, smoothing, V, CAP, SMOOTH, False, log_sum))
            else:
                inside = (lane >= shift - at) & (lane < end - at)
                x = tl.load(source + at + lane, mask=inside, other=0.0)
                tl.store(
                    out,
                    softmax_grad(x, top, g, hit, scale, cap, smoothing, V, CAP, SMOOTH, False, log_sum),
                    mask=inside,
                )
