"""Back end for any device: tiles of tokens by vocabulary columns in plain torch, no wider than asked.

For a frozen head one sweep over the vocabulary is enough: the softmax is kept up to a factor a row, corrected as the
running maximum grows (Milakov and Gimelshein, 2018, arXiv 1805.02867) and divided out at the end, so the head costs its
two matrix products and no tile is computed twice. The label's own column stays out of the sweep and is added last, from
the sum of all others: a confident token has p - 1 close to zero, which would cancel. Gradients of weight and bias need
the finished softmax: where the width is ours to choose, a few tokens' whole rows of logits serve both, else there is a
second sweep.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from opake_kernels.launch import cdiv

from .passes import Gradients, Head, Need, accumulator_dtype, product_into

__all__ = ["AUTOMATIC", "DEFAULT_WIDTH", "ROW_BYTES", "TILE_BYTES", "chunked_pass"]

# columns of a tile, and bytes of a tile in the accumulator's dtype: about what stays in a core's cache
DEFAULT_WIDTH = 4096
TILE_BYTES = 8 * 2**20
# the width where nobody asked for one, and what whole rows of logits may take
AUTOMATIC = -1
ROW_BYTES = 48 * 2**20


def tile_tokens(R: int, width: int, element_size: int, most_bytes: int) -> int:
    """Tokens in a tile, from 32 upwards, shared out evenly."""
    most = max(most_bytes // (width * element_size), 32)
    return max(cdiv(R, cdiv(R, most)), 1) if R else 1


def chunked_pass(head: Head, need: Need, width: int = AUTOMATIC) -> Gradients:
    """See passes.py. Gradients: hidden in the dtype of x; weight and bias in float32, or float64 for float64."""
    parameters = need.weight or need.bias
    if width == AUTOMATIC and parameters:
        return _whole_rows(head, need)
    width = DEFAULT_WIDTH if width == AUTOMATIC else width
    first, lse = _first_sweep(head, need.hidden and not parameters, width)
    return _second_sweep(head, need, width, first.loss, lse) if parameters else first


def _slices(total: int, step: int) -> Iterator[slice]:
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


def _product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """a @ b + bias, rounded as a linear layer rounds it, in the accumulator's dtype."""
    z = torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
    return z.to(accumulator_dtype(a.dtype))


def _logits(head: Head, rows: slice, columns: slice, slope: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scaled and capped logits of one tile in the accumulator's dtype, and with `slope` what the cap multiplies."""
    settings = head.settings
    z = _product(head.x[rows], head.weight[columns].t(), None if head.bias is None else head.bias[columns])
    if settings.scale != 1.0:
        z *= settings.scale
    if not settings.softcap:
        return z, None
    z.div_(settings.softcap).tanh_()
    slopes = _slope(z) if slope else None
    return z.mul_(settings.softcap), slopes


def _slope(tanh: torch.Tensor) -> torch.Tensor:
    """Derivative of a capped logit by the scaled one."""
    return 1.0 - tanh.square()


def _finite_or_zero(top: torch.Tensor) -> torch.Tensor:
    """The maximum of a row, or 0 while all of its logits were minus infinity, which no difference is taken from."""
    return torch.where(top == -torch.inf, 0.0, top)


def _label_column(labels_R: torch.Tensor, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """(inside, column): whether a token's label lies in the tile, and where, (R, 1); column 0 if it does not."""
    column = labels_R.long() - columns.start
    inside = (column >= 0) & (column < columns.stop - columns.start)
    return inside, torch.where(inside, column, 0).unsqueeze(1)


def _counted(head: Head, rows: slice, like: torch.Tensor) -> torch.Tensor:
    """The factor of each token's gradient: `scale`, 0 where ignored, NaN where the label is out of range."""
    labels, V = head.labels[rows], head.weight.shape[0]
    scale = torch.ones_like(like) if head.scale is None else head.scale[rows].to(like.dtype)
    scale = scale.masked_fill((labels < 0) | (labels >= V), torch.nan)
    return scale.masked_fill(labels == head.settings.ignore_index, 0.0)


def _first_sweep(head: Head, hidden: bool, width: int) -> tuple[Gradients, torch.Tensor]:
    """Loss and gradient of x; and the logsumexp as (R, 2), the largest logit and the log of the sum against it."""
    x = head.x
    R, wide = x.shape[0], accumulator_dtype(x.dtype)
    loss = torch.empty(R, dtype=wide, device=x.device)
    lse, dx = loss.new_empty(R, 2), torch.empty_like(x) if hidden else None
    width = min(width, head.weight.shape[0])
    # without a soft cap the smoothing term is the same for all tokens
    columns = None
    if hidden and head.settings.smoothing and not head.settings.softcap:
        columns = head.weight.sum(0, dtype=wide)
    for rows in _slices(R, tile_tokens(R, width, lse.element_size(), TILE_BYTES)):
        loss[rows], lse[rows], found = _sweep_rows(head, rows, hidden, width, columns)
        if dx is not None:
            dx[rows] = found
    return Gradients(loss, dx), lse


def _sweep_rows(head: Head, rows: slice, hidden: bool, width: int, columns_H: torch.Tensor | None):
    """(loss, parts of lse, gradient of x or None) of the tokens `rows`, in one sweep over the vocabulary."""
    x, w, labels, settings = head.x[rows], head.weight, head.labels[rows], head.settings
    V, smoothing, cap = w.shape[0], settings.smoothing, settings.softcap
    # top: running maximum; rest: sum of exponentials without the label's; own: the label's logit
    top = torch.full(labels.shape, -torch.inf, dtype=accumulator_dtype(x.dtype), device=x.device)
    rest, own, total = (torch.zeros_like(top) for _ in range(3))
    dx = top.new_zeros(x.shape) if hidden else None
    # what uniform smoothing adds, for each token where the cap makes a difference
    flat = columns_H if columns_H is not None else top.new_zeros(x.shape if hidden and smoothing else (0,))

    for columns in _slices(V, width):
        z, slope = _logits(head, rows, columns, hidden)
        inside, column = _label_column(labels, columns)
        own = torch.where(inside, z.gather(1, column).squeeze(1), own)
        higher = torch.maximum(top, z.amax(1))
        before, origin = _finite_or_zero(top), _finite_or_zero(higher)
        z.sub_(origin.unsqueeze(1))
        if smoothing:
            # of logits less the running maximum, so that a common offset costs no digits
            total += z.sum(1) - columns.start * (origin - before)
        shrink, top = torch.exp(top - origin), higher
        z.exp_()
        z.scatter_(1, column, torch.where(inside.unsqueeze(1), 0.0, z.gather(1, column)))
        rest = rest * shrink + z.sum(1)
        if dx is not None:
            if slope is not None:
                z *= slope
                if smoothing:
                    product_into(flat, slope.to(x.dtype), w[columns], first=False)
            dx *= shrink.unsqueeze(1)
            product_into(dx, z.to(x.dtype), w[columns], first=False)

    own_share = torch.exp(own - top)
    log_sum = torch.log(rest + own_share)
    missing = (1.0 - smoothing) * (top - own) - smoothing * (total / V) if smoothing else top - own
    loss, lse = missing + log_sum, torch.stack((top, log_sum), 1)
    factor, ignored = _counted(head, rows, top), labels == settings.ignore_index
    if dx is not None:
        slope = _slope(own / cap) if cap else 1.0
        label = w[labels.long().clamp(0, V - 1)] * ((smoothing - rest / (rest + own_share)) * slope).unsqueeze(1)
        dx = dx.div_((rest + own_share).unsqueeze(1)).add_(label)
        if smoothing:
            dx -= flat * (smoothing / V)
        dx = dx.mul_((factor * settings.scale).unsqueeze(1)).masked_fill_(ignored.unsqueeze(1), 0.0)
    # NaN where the label is out of range
    loss = (loss + 0.0 * factor).masked_fill_(ignored, 0.0)
    return loss, lse.masked_fill_(ignored.unsqueeze(1), 0.0), dx


def _second_sweep(head: Head, need: Need, width: int, loss_R: torch.Tensor, lse_R2: torch.Tensor) -> Gradients:
    """Gradients from the finished softmax; the vocabulary outside, so that a tile of dW is summed where it stays."""
    x, w = head.x, head.weight
    (R, H), V, wide = x.shape, w.shape[0], accumulator_dtype(x.dtype)
    dx = torch.zeros(R, H, dtype=wide, device=x.device) if need.hidden else None
    dw = torch.zeros(V, H, dtype=wide, device=x.device) if need.weight else None
    db = torch.zeros(V, dtype=wide, device=x.device) if need.bias else None
    width = min(width, V)
    for columns in _slices(V, width):
        for rows in _slices(R, tile_tokens(R, width, lse_R2.element_size(), TILE_BYTES)):
            d = _tile_gradient(head, rows, columns, lse_R2[rows])
            if db is not None:
                db[columns] += d.sum(0)
            d = d.to(x.dtype)
            if dx is not None:
                product_into(dx[rows], d, w[columns], first=False)
            if dw is not None:
                product_into(dw[columns], d.t(), x[rows], first=False)
    return Gradients(loss_R, None if dx is None else dx.to(x.dtype), dw, db)


def _whole_rows(head: Head, need: Need) -> Gradients:
    """Loss and all gradients at three products: each logit is computed once, for as many tokens as ROW_BYTES hold."""
    x, w, settings = head.x, head.weight, head.settings
    (R, H), V, wide = x.shape, w.shape[0], accumulator_dtype(x.dtype)
    loss = torch.zeros(R, dtype=wide, device=x.device)
    every = slice(0, V)
    dx = torch.empty_like(x) if need.hidden else None
    dw = torch.zeros(V, H, dtype=wide, device=x.device) if need.weight else None
    db = torch.zeros(V, dtype=wide, device=x.device) if need.bias else None
    for rows in _slices(R, tile_tokens(R, V, loss.element_size(), ROW_BYTES)):
        z, slope = _logits(head, rows, every, True)
        inside, column = _label_column(head.labels[rows], every)
        own, ignored = z.gather(1, column).squeeze(1), head.labels[rows] == settings.ignore_index
        top = z.amax(1)
        z.sub_(top.unsqueeze(1))
        missing = top - own
        if settings.smoothing:
            missing = (1.0 - settings.smoothing) * missing - settings.smoothing * z.mean(1)
        d = z.exp_()
        total = d.sum(1)
        log_sum = total.log()
        loss[rows] = (missing + log_sum).masked_fill(~inside, torch.nan).masked_fill(ignored, 0.0)
        _finish_tile(head, rows, d.div_(total.unsqueeze(1)), inside, column, slope)
        if db is not None:
            db += d.sum(0)
        d = d.to(x.dtype)
        if dx is not None:
            part = torch.zeros(d.shape[0], H, dtype=wide, device=x.device)
            product_into(part, d, w, first=True)
            dx[rows] = part
        if dw is not None:
            product_into(dw, d.t(), x[rows], first=rows.start == 0)
    return Gradients(loss, dx, dw, db)


def _tile_gradient(head: Head, rows: slice, columns: slice, lse_R2: torch.Tensor) -> torch.Tensor:
    """The gradient by the logits of a tile; `lse_R2` of its tokens."""
    z, slope = _logits(head, rows, columns, True)
    # an ignored token has no lse; with an infinite one its softmax is zero
    ignored = head.labels[rows] == head.settings.ignore_index
    top, log_sum = lse_R2.masked_fill(ignored.unsqueeze(1), torch.inf).split(1, 1)
    d = z.sub_(top).sub_(log_sum).exp_()
    _finish_tile(head, rows, d, *_label_column(head.labels[rows], columns), slope)
    return d


def _finish_tile(
    head: Head, rows: slice, d: torch.Tensor, inside: torch.Tensor, column: torch.Tensor, slope: torch.Tensor | None
) -> None:
    """From softmax to gradient, in place."""
    settings = head.settings
    factor = _counted(head, rows, d[:, 0]) * settings.scale
    d.scatter_add_(1, column, (inside.to(d.dtype) * (settings.smoothing - 1.0)).unsqueeze(1))
    if settings.smoothing:
        d -= settings.smoothing / head.weight.shape[0]
    if slope is not None:
        d *= slope
    d.mul_(factor.unsqueeze(1))
