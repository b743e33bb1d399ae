"""LayerNorm whose weight may be an offset from one, with gradients of weight and bias per group.

A kernel of a plugin's own, made like those of opake: a plain twin first, then a forward and a backward in Triton, and
`function_pair`, which folds any nesting of vmap and grad into the (group, row, column) layout that the kernels see.
Leaves out rows wider than one tile, which take the twin.
"""

from __future__ import annotations

from typing import Any

import torch

from opake_kernels.checks import check_float, check_same_device
from opake_kernels.fold import ROWS, SHARED, fold_rows, fold_shared, function_pair
from opake_kernels.launch import cdiv, jit, launch, next_power_of_2, tl, uses_triton, warps_for

__all__ = ["layer_norm_reference", "opake_layer_norm"]

WIDEST = 16384
# programs that share the rows of one group in backward, each with a partial sum of its own
PROGRAMS = 64


def layer_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float = 1e-5, offset: float = 0.0
) -> torch.Tensor:
    """Plain PyTorch twin of `opake_layer_norm`: same arguments, any device and dtype."""
    compute = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(compute)
    centred = wide - wide.mean(-1, keepdim=True)
    xhat = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = xhat * (_beside(weight, x).to(compute) + offset)
    return (y if bias is None else y + _beside(bias, x).to(compute)).to(x.dtype)


def _beside(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """(H,) as it is; (B, H), one row an example, as (B, 1, ..., H)."""
    return w if w.dim() == 1 else w.view(w.shape[0], *[1] * (x.dim() - 2), w.shape[1])


@jit
def _forward_kernel(
    X, W, B, Y, MEAN, RSTD, R, w_step, b_step, eps, COLS: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    group = row // R
    col = tl.arange(0, BLOCK)
    live = col < COLS
    x = tl.load(X + row * COLS + col, live, 0.0).to(tl.float32)
    mean = tl.sum(x, 0) / COLS
    centred = tl.where(live, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 0) / COLS + eps)
    y = centred * rstd * (tl.load(W + group * w_step + col, live, 0.0).to(tl.float32) + OFFSET)
    if B is not None:
        y += tl.load(B + group * b_step + col, live, 0.0).to(tl.float32)
    tl.store(Y + row * COLS + col, y, live)
    tl.store(MEAN + row, mean)
    tl.store(RSTD + row, rstd)


@jit
def _backward_kernel(
    DY, X, W, MEAN, RSTD, DX, DW, DB, R, per_program, programs, w_step,
    COLS: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    group = program // programs
    first = (program % programs) * per_program
    col = tl.arange(0, BLOCK)
    live = col < COLS
    w = tl.load(W + group * w_step + col, live, 0.0).to(tl.float32) + OFFSET
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    for local in range(first, tl.minimum(first + per_program, R)):
        row = group * R + local
        x = tl.load(X + row * COLS + col, live, 0.0).to(tl.float32)
        dy = tl.load(DY + row * COLS + col, live, 0.0).to(tl.float32)
        rstd = tl.load(RSTD + row)
        xhat = tl.where(live, (x - tl.load(MEAN + row)) * rstd, 0.0)
        dw += dy * xhat
        db += dy
        if DX is not None:
            g = tl.where(live, dy * w, 0.0)
            dx = (g - tl.sum(g, 0) / COLS - xhat * (tl.sum(g * xhat, 0) / COLS)) * rstd
            tl.store(DX + row * COLS + col, dx, live)
    tl.store(DW + program * COLS + col, dw, live)
    tl.store(DB + program * COLS + col, db, live)


def _shared(w: torch.Tensor | None, groups: int, x: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """(1 | G, C), and the step from group to group: 0 where all groups share it."""
    if w is None:
        return None, 0
    w = fold_shared(w, groups, x).contiguous()
    return w, w.shape[-1] if w.shape[0] > 1 else 0


def _forward(x: Any, weight: Any, bias: Any, groups: int, eps: float, offset: float) -> tuple[torch.Tensor, ...]:
    rows = fold_rows(x, groups).contiguous()
    (G, R, C), y = rows.shape, torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mean, rstd = (torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) for _ in range(2))
    (w, w_step), (b, b_step) = _shared(weight, groups, x), _shared(bias, groups, x)
    block = next_power_of_2(C)
    meta = {"COLS": C, "OFFSET": offset, "BLOCK": block, "num_warps": warps_for(block)}
    launch(_forward_kernel, (G * R,), x, rows, w, b, y, mean, rstd, R, w_step, b_step, eps, **meta)
    return y, mean, rstd


def _backward(grads: Any, saved: Any, need: Any, groups: int, eps: float, offset: float) -> list[torch.Tensor | None]:
    x, weight, mean, rstd = saved
    rows, dy = fold_rows(x, groups).contiguous(), fold_rows(grads[0], groups).contiguous()
    G, R, C = rows.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if need[0] else None
    per_program = max(1, cdiv(R, PROGRAMS))
    programs = max(1, cdiv(R, per_program))
    dw, db = (torch.zeros((G, programs, C), dtype=torch.float32, device=x.device) for _ in range(2))
    w, w_step = _shared(weight, groups, x)
    block = next_power_of_2(C)
    args = (dy, rows, w, mean.contiguous(), rstd.contiguous(), dx, dw, db, R, per_program, programs, w_step)
    meta = {"COLS": C, "OFFSET": offset, "BLOCK": block, "num_warps": warps_for(block)}
    launch(_backward_kernel, (G * programs if R else 0,), x, *args, **meta)
    shape = (*x.shape[:groups], C)
    found = [dx, *(part.sum(1).view(shape).to(weight.dtype) for part in (dw, db))]
    return [grad if wanted else None for grad, wanted in zip(found, need, strict=True)]


_pair = function_pair(
    "opake_layer_norm",
    forward=_forward,
    backward=_backward,
    roles=(ROWS, SHARED, SHARED),
    save_inputs=(0, 1),
    save_outputs=(1, 2),
    stats=2,
)


def opake_layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, eps: float = 1e-5, *, offset: float = 0.0
) -> torch.Tensor:
    """(x - mean) / sqrt(var + eps) * (weight + offset) + bias over the last dimension; sums are float32.

    x: (..., H). weight, bias: (H,), or (B, H) beside x of (B, ..., H), one row for each example, both alike.
    offset: 1.0 for Nemotron's weights around zero. Returns (..., H) in the dtype of x. Raises TypeError for a dtype
    that is no float, ValueError for shapes and devices.
    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016 (arXiv:1607.06450).
    """
    given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    check_float("opake_layer_norm", x=x, **given)
    check_same_device("opake_layer_norm", x=x, **given)
    for name, w in given.items():
        if w.shape not in ((x.shape[-1],), (x.shape[0], x.shape[-1])) or w.dim() != weight.dim():
            raise ValueError(
                f"opake_layer_norm: {name} has shape {tuple(w.shape)} and weight {tuple(weight.shape)}, expected both"
                f" ({x.shape[-1]},) or both ({x.shape[0]}, {x.shape[-1]}), beside x of shape {tuple(x.shape)}"
            )
    if not uses_triton(x, weight, bias) or x.shape[-1] > WIDEST or not x.numel():
        return layer_norm_reference(x, weight, bias, eps, offset)
    return _pair(x, weight, bias, weight.dim() - 1, eps, float(offset))[0]
