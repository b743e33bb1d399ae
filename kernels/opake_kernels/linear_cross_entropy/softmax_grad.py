"""One launch over rows of logits: the loss of each token, and the gradient written over the logits.

A row is read twice and written once. Only a buffer that nobody else holds may be handed in.
"""

from __future__ import annotations

import torch

from opake_kernels.cross_entropy import CrossEntropySettings
from opake_kernels.launch import jit, launch, next_power_of_2, tl
from opake_kernels.row_softmax import row_loss, softmax_grad

__all__ = ["softmax_grad_"]


@jit
def linear_cross_entropy_kernel(
    Z, Y, LOSS, G, stride, V, ignore, scale, cap, smoothing,
    CAP: tl.constexpr, SMOOTH: tl.constexpr, GRAD: tl.constexpr, SCALED: tl.constexpr,
    T: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """One row a program; rows begin at multiples of 16 bytes. SCALED: the gradient is times G."""
    row = tl.program_id(0).to(tl.int64)
    start = row * stride
    y = tl.load(Y + row)
    lane = tl.arange(0, T * W)
    base = Z + tl.multiple_of(start, W)
    whole = V // (T * W) * (T * W)
    if y == ignore:
        tl.store(LOSS + row, 0.0)
        if GRAD:
            for at in range(0, V, T * W):
                tl.store(base + at + lane, tl.zeros((T * W,), tl.float32), mask=at + lane < V)
    else:
        valid, loss, top, log_sum = row_loss(  # pyright: ignore
            Z, start, y, V, scale, cap, smoothing, CAP, SMOOTH, T, W
        )
        tl.store(LOSS + row, loss)
        if GRAD:
            g = 1.0
            if SCALED:
                g = tl.load(G + row)
            g = tl.where(valid, g, float("nan"))
            for at in range(0, whole, T * W):
                x = tl.load(base + at + lane)
                d = softmax_grad(x, top, g, lane == y - at, scale, cap, smoothing, V, CAP, SMOOTH, True, log_sum)
                tl.store(base + at + lane, d)
            if whole < V:
                x = tl.load(base + whole + lane, mask=whole + lane < V, other=0.0)
                d = softmax_grad(x, top, g, lane == y - whole, scale, cap, smoothing, V, CAP, SMOOTH, True, log_sum)
                tl.store(base + whole + lane, d, mask=whole + lane < V)


def softmax_grad_(
    z_RV: torch.Tensor,
    labels_R: torch.Tensor,
    loss_R: torch.Tensor,
    settings: CrossEntropySettings,
    *,
    gradient: bool,
    scale_R: torch.Tensor | None = None,
) -> None:
    """Fill loss_R, and turn z_RV into its gradient if asked.

    z_RV: rows aligned to 16 bytes, last stride 1; labels_R, loss_R, scale_R contiguous.
    """
    R, V = z_RV.shape
    W = 16 // z_RV.element_size()
    T = min(1024, max(32, next_power_of_2(V // W)))
    launch(
        linear_cross_entropy_kernel, (R,), z_RV, z_RV, labels_R, loss_R, loss_R if scale_R is None else scale_R,
        z_RV.stride(0), V, settings.ignore_index, settings.scale, settings.softcap, settings.smoothing,
        CAP=bool(settings.softcap), SMOOTH=bool(settings.smoothing), GRAD=gradient,
        SCALED=scale_R is not None, T=T, W=W, num_warps=max(T // 64, 1),
    )  # fmt: skip
