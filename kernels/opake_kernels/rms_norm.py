"""RMSNorm with the cast before or after the weight, a weight offset, and per-example weight gradients.

One op for the variants found in decoders: Llama rounds to the input's dtype before the weight, Olmo and gpt-oss after
it, Gemma adds one to a zero-centred weight in fp32. The weight may be frozen, absent, or hold one row for each
example. Leaves out LayerNorm, and normalising over more than the last dimension.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from .checks import ExampleAxisError, check_float, check_same_device
from .fold import ROWS, SHARED, function_pair
from .launch import uses_triton
from .rms_launch import rms_backward, rms_forward

__all__ = ["check_norm", "norm_dtype", "opake_rms_norm", "rms_norm_reference", "rounds_first"]

Cast = Literal["before", "after"]


def rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    cast: Cast | None = None,
) -> torch.Tensor:
    """Plain PyTorch twin of `opake_rms_norm`: same arguments, any device, differentiable to any order."""
    compute = torch.promote_types(x.dtype, torch.float32)
    xhat = x.to(compute)
    xhat = xhat * torch.rsqrt(xhat.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return xhat.to(x.dtype)
    scale = weight.to(compute) + offset if offset else weight
    if weight.dim() == 2:
        scale = scale.view(weight.shape[0], *[1] * (x.dim() - 2), weight.shape[1])
    if rounds_first(offset, cast):
        return (scale * xhat.to(x.dtype)).to(torch.promote_types(x.dtype, weight.dtype))
    return (scale * xhat).to(x.dtype)


def rounds_first(offset: float, cast: Cast | None) -> bool:
    """Whether the normalised row is rounded before the weight; without a word, only where the weight has no offset."""
    return cast == "before" or (cast is None and offset == 0.0)


def check_norm(op: str, x: Any, weight: Any, cast: Any) -> None:
    """Raise unless x is (..., H) and the weight None, (H,) or (B, H) with B = x.shape[0]."""
    check_float(op, x=x)
    if x.dim() == 0:
        raise ValueError(f"{op}: x must have a last dimension to normalise, got a scalar")
    if cast not in (None, "before", "after"):
        raise ValueError(f"{op}: cast must be 'before' or 'after', got {cast!r}")
    if weight is None:
        return
    check_float(op, weight=weight)
    check_same_device(op, x=x, weight=weight)
    shape = weight.shape
    if weight.dim() == 1 and shape[0] == x.shape[-1]:
        return
    if weight.dim() == 2 and x.dim() >= 2 and shape[0] == x.shape[0] and shape[1] == x.shape[-1]:
        return
    kind = ExampleAxisError if weight.dim() == 2 and shape[1] == x.shape[-1] else ValueError
    raise kind(
        f"{op}: weight has shape {tuple(shape)}, expected ({x.shape[-1]},), or one row an example: "
        f"({x.shape[0]}, {x.shape[-1]}), beside x of shape {tuple(x.shape)}"
    )


def _forward(x, weight, groups, eps, offset, round_first):
    y, _, rstd = rms_forward(x, None, weight, groups, eps, offset, round_first)
    return y, rstd


def _backward(grads, saved, need, groups, eps, offset, round_first):
    x, weight, rstd = saved
    return rms_backward(grads[0], x, weight, rstd, None, need[0], need[1], groups, offset)


def norm_dtype(total: torch.dtype, weight: torch.Tensor | None, round_first: bool) -> torch.dtype:
    """The dtype of a normalised row."""
    return total if weight is None or not round_first else torch.promote_types(total, weight.dtype)


def _outline(x, weight, groups, eps, offset, round_first):
    return [(x.shape, norm_dtype(x.dtype, weight, round_first)), (x.shape[:-1], torch.float32)]


_PAIR = function_pair(
    "opake_rms_norm",
    forward=_forward,
    backward=_backward,
    roles=(ROWS, SHARED),
    save_inputs=(0, 1),
    save_outputs=(1,),
    stats=1,
    outline=_outline,
)


def opake_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    cast: Cast | None = None,
) -> torch.Tensor:
    """Root-mean-square normalisation of the last dimension: x / sqrt(mean(x^2) + eps) * (weight + offset).

    x: (..., H), any strides, fp16, bf16, fp32 (float64 takes the plain twin); statistics and sums are fp32.
    weight: (H,), of any floating dtype; None for none; or (B, H) beside x of (B, ..., H): one row for each example,
        whose gradient is (B, H). A weight of two dimensions with weight.shape[0] == x.shape[0] is read that way; it may
        be an expanded view.
    offset: added to the weight in fp32 (1.0 for Gemma's zero-centred weights).
    cast: "before" rounds to x's dtype before the weight (Llama), the result has the promoted dtype of x and weight;
        "after" rounds once, at the end, to x's dtype (Olmo 2, gpt-oss, Gemma). Default: "before", but "after" with an
        offset.

    Returns (..., H) in the layout of x. Works under any nesting of vmap and grad; backward once, no forward mode.
    Without CUDA and Triton the plain twin serves. Raises TypeError for dtypes, ValueError for shapes, devices, `cast`.
    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019 (arXiv:1910.07467).
    """
    check_norm("opake_rms_norm", x, weight, cast)
    if not uses_triton(x, weight):
        return rms_norm_reference(x, weight, eps, offset=offset, cast=cast)
    groups = 1 if weight is not None and weight.dim() == 2 else 0
    return _PAIR(x, weight, groups, eps, float(offset), rounds_first(offset, cast))[0]
