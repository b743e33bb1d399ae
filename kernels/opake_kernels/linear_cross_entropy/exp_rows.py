"""One pass over rows of logits for a frozen head: exponentials written over the logits, normalised after the product.

The gradient of a token's hidden state is sum_v p_v W_v - W_y. Its softmax may be off by any factor until the matrix
product is done, so a row need not be read twice: exponentials are taken against the first maximum that comes along, and
only if a later logit exceeds that by far is what was written corrected (the lazy form of arXiv 1805.02867). The label's
own term is left out of the product and added with p_y - 1 taken from the sum of all others, which keeps its digits for
a confident token. Label smoothing has no such form.
"""

from __future__ import annotations

import torch

from opake_kernels.cross_entropy import CrossEntropySettings
from opake_kernels.launch import cdiv, jit, launch, next_power_of_2, tl
from opake_kernels.precise import precise_exp, precise_log
from opake_kernels.row_softmax import cap_scale, cap_scale_grad, finite_or_zero

__all__ = ["exp_rows_", "finish_rows"]


@jit
def _exp_tile(
    x, base, at, lane, y, inside, m, most, total, scale, cap,
    LIMIT: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Exponentials of the logits x of one tile against m, in their place; (m, largest logit, total) afterwards."""
    z = cap_scale(x, scale, cap, CAP)
    if MASKED:
        z = tl.where(inside, z, -float("inf"))
    top = tl.max(z, 0)
    most = tl.maximum(most, top)
    if top > m + LIMIT:
        shrink = precise_exp(m - top)
        total = total * shrink
        for back in range(0, at, B):
            done = tl.load(base + back + lane).to(tl.float32)
            tl.store(base + back + lane, done * shrink)
        m = top
    # 16-bit logits do not carry what the precise form adds
    z = z - finite_or_zero(m)  # pyright: ignore
    e = precise_exp(z) if x.dtype == tl.float32 else tl.exp(z)
    e = tl.where(lane == y - at, 0.0, e)
    total += e
    if CAP:
        e *= cap_scale_grad(x.to(tl.float32) * scale, 1.0, cap, CAP)
    if MASKED:
        tl.store(base + at + lane, e, mask=inside)
    else:
        tl.store(base + at + lane, e)
    return m, most, total


@jit
def linear_cross_entropy_exp_kernel(
    Z, Y, LOSS, FACTOR, LABEL, stride, V, ignore, scale, cap,
    LIMIT: tl.constexpr, CAP: tl.constexpr, W: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """One row a program. FACTOR: what the product is to be multiplied by; LABEL: the coefficient of the label's row."""
    row = tl.program_id(0).to(tl.int64)
    start = row * stride
    base = Z + tl.multiple_of(start, W)
    y = tl.load(Y + row)
    lane = tl.arange(0, B)
    whole = V // B * B
    if y == ignore:
        for at in range(0, V, B):
            tl.store(base + at + lane, tl.zeros((B,), tl.float32), mask=at + lane < V)
        tl.store(LOSS + row, 0.0)
        tl.store(FACTOR + row, 0.0)
        tl.store(LABEL + row, 0.0)
    else:
        valid = (y >= 0) & (y < V)
        label = tl.load(Z + start + tl.where(valid, y, 0))
        own = cap_scale(label, scale, cap, CAP)
        m, most = own, own
        total = tl.zeros((B,), tl.float32)
        if whole > 0:
            x = tl.load(base + lane)
            for at in range(0, whole, B):
                # asked for before this tile is waited for; after the last one nobody looks at it
                following = tl.load(base + tl.minimum(at + B, whole - B) + lane)
                m, most, total = _exp_tile(  # pyright: ignore
                    x, base, at, lane, y, lane < B, m, most, total, scale, cap, LIMIT, CAP, False, B
                )
                x = following
        if whole < V:
            inside = whole + lane < V
            x = tl.load(base + whole + lane, mask=inside, other=0.0)
            m, most, total = _exp_tile(  # pyright: ignore
                x, base, whole, lane, y, inside, m, most, total, scale, cap, LIMIT, CAP, True, B
            )
        rest = tl.sum(total, 0)
        s = rest + precise_exp(own - m)
        # against the largest logit, from which m may be far: the log of a large sum has no digits to spare
        log_s = precise_log(s * precise_exp(m - most))
        tl.store(LOSS + row, tl.where(valid, (most - own) + log_s, float("nan")))
        tl.store(FACTOR + row, tl.where(valid, scale / s, float("nan")))
        tl.store(LABEL + row, -rest / s * cap_scale_grad(label, scale, cap, CAP))


@jit
def linear_cross_entropy_finish_kernel(D, OUT, WEIGHT, Y, FACTOR, LABEL, V, H, w_row, w_column, B: tl.constexpr):
    """OUT = FACTOR * D + LABEL * (the label's row of WEIGHT), a block of one row a program."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * B + tl.arange(0, B)
    inside = lane < H
    y = tl.load(Y + row).to(tl.int64)
    y = tl.where((y >= 0) & (y < V), y, 0)
    w = tl.load(WEIGHT + y * w_row + lane * w_column, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(D + row * H + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + row * H + lane, d * tl.load(FACTOR + row) + w * tl.load(LABEL + row), mask=inside)


def exp_rows_(
    z_RV: torch.Tensor,
    labels_R: torch.Tensor,
    loss_R: torch.Tensor,
    factor_R: torch.Tensor,
    label_R: torch.Tensor,
    settings: CrossEntropySettings,
) -> None:
    """Turn logits into exponentials in place; fill loss, and factor and label for `finish_rows`.

    z_RV: rows aligned to 16 bytes, last stride 1; the rest contiguous and float32, labels apart.
    """
    R, V = z_RV.shape
    W = 16 // z_RV.element_size()
    # 32 columns of 16 bits a thread: the maximum of a tile, for which all wait, is taken once for many; the slope of a
    # soft cap needs registers that 16 warps do not have
    T = min(1024 if settings.softcap else 2048, max(32, next_power_of_2(V // W)))
    # sums of products of up to e^60 stay far below the largest float32, and e^8 below the largest float16
    limit = 8.0 if z_RV.dtype == torch.float16 else 60.0
    launch(
        linear_cross_entropy_exp_kernel, (R,), z_RV, z_RV, labels_R, loss_R, factor_R, label_R, z_RV.stride(0),
        V, settings.ignore_index, settings.scale, settings.softcap,
        LIMIT=limit, CAP=bool(settings.softcap), W=W, B=T * W, num_warps=max(T // 128, 1),
    )  # fmt: skip


def finish_rows(
    product_RH: torch.Tensor,
    out_RH: torch.Tensor,
    weight_VH: torch.Tensor,
    labels_R: torch.Tensor,
    factor_R: torch.Tensor,
    label_R: torch.Tensor,
) -> None:
    """The gradient of the hidden states from exponentials @ weight; product and out are contiguous."""
    (R, H), V = product_RH.shape, weight_VH.shape[0]
    block = min(1024, next_power_of_2(H))
    launch(
        linear_cross_entropy_finish_kernel, (R, cdiv(H, block)), out_RH, product_RH, out_RH, weight_VH, labels_R,
        factor_R, label_R, V, H, *weight_VH.stride(), B=block, num_warps=4,
    )  # fmt: skip
