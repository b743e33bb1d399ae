"""Residual addition and the RMSNorm that follows it, in one pass forward and one backward.

A pre-norm decoder layer adds a branch to the residual stream and normalises the sum; both are needed later. Fused,
the sum is written once and never read back, and the gradient that reaches the sum directly is added in the norm's own
backward pass. Leaves out scaling the branch (Granite) and norms before the addition (Olmo 2, Gemma 2): those stay two
ops.
"""

from __future__ import annotations

import torch

from .checks import check_float, check_same_device, check_shape
from .fold import ROWS, SHARED, function_pair
from .launch import uses_triton
from .rms_launch import rms_backward, rms_forward
from .rms_norm import Cast, check_norm, norm_dtype, rms_norm_reference, rounds_first

__all__ = ["fused_add_rms_norm_reference", "opake_fused_add_rms_norm"]


def fused_add_rms_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    cast: Cast | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain PyTorch twin of `opake_fused_add_rms_norm`: same arguments, any device, differentiable to any order."""
    total = x + residual
    return rms_norm_reference(total, weight, eps, offset=offset, cast=cast), total


def _backward(grads, saved, need, groups, eps, offset, round_first, dtypes):
    weight, total, rstd = saved
    dy, dsum = grads
    if dy is None:
        # only the sum was used: its gradient passes through, and the weight has none
        dw = None
        if need[2]:
            dw = torch.zeros((*total.shape[:groups], total.shape[-1]), dtype=weight.dtype, device=total.device)
        dx = dsum
    else:
        dx, dw = rms_backward(dy, total, weight, rstd, dsum, need[0] or need[1], need[2], groups, offset)
    return [None if dx is None else dx.to(dtype) for dtype in dtypes] + [dw]


def _outline(x, residual, weight, groups, eps, offset, round_first, dtypes):
    total = torch.promote_types(*dtypes)
    return [(x.shape, norm_dtype(total, weight, round_first)), (x.shape, total), (x.shape[:-1], torch.float32)]


_PAIR = function_pair(
    "opake_fused_add_rms_norm",
    forward=lambda x, residual, weight, groups, eps, offset, round_first, dtypes: rms_forward(
        x, residual, weight, groups, eps, offset, round_first
    ),
    backward=_backward,
    roles=(ROWS, ROWS, SHARED),
    save_inputs=(2,),
    save_outputs=(1, 2),
    outputs=2,
    stats=1,
    outline=_outline,
)


def opake_fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    cast: Cast | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """sum = x + residual, rounded as an addition of its own would be, and norm = opake_rms_norm(sum, weight, ...).

    x, residual: (..., H), one shape, any strides; the sum has their promoted dtype.
    weight, eps, offset, cast: as in `opake_rms_norm`, (B, H) weights included.

    Returns (norm, sum). One launch forward and one backward, in which the gradient of the sum is added to that of the
    norm; x and residual receive the same gradient. Raises TypeError for dtypes, ValueError for shapes and devices.
    """
    op = "opake_fused_add_rms_norm"
    check_norm(op, x, weight, cast)
    check_float(op, residual=residual)
    check_same_device(op, x=x, residual=residual)
    check_shape(op, "residual", residual.shape, x.shape, "the shape of x")
    if not uses_triton(x, residual, weight):
        return fused_add_rms_norm_reference(x, residual, weight, eps, offset=offset, cast=cast)
    groups = 1 if weight is not None and weight.dim() == 2 else 0
    dtypes = (x.dtype, residual.dtype)
    return _PAIR(x, residual, weight, groups, eps, float(offset), rounds_first(offset, cast), dtypes)[:2]
