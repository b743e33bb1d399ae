"""From tensors to launches of the RMSNorm kernels: tile sizes, strides, and how the rows of a group are shared out.

Tensors come as (*groups, ..., C) with weights (*groups or ones, C), see fold.py. Rows are taken in the order of
memory and outputs keep the layout of the input, so q and k norms on transposed or sliced projections copy nothing.
Sizes follow from shapes and from the number of multiprocessors alone. Leaves out every check: the public functions
have made them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from .fold import fold_groups, fold_shared
from .launch import cdiv, launch, next_power_of_2, warps_for
from .rms_kernels import (
    rms_norm_bwd_kernel,
    rms_norm_dw_sum_kernel,
    rms_norm_fwd_kernel,
    rms_norm_wide_bwd_kernel,
    rms_norm_wide_dw_kernel,
    rms_norm_wide_fwd_kernel,
)
from .strided_rows import dense_like, invert, memory_order, row_strides

__all__ = ["rms_backward", "rms_forward"]

# beyond this a row no longer fits the registers of one program, or not together with its gradient
_WIDEST_ROW, _WIDEST_TILE = 32768, 16384
# from here on a program cannot keep the weight between rows
_WIDE_TILE = 16384
# bytes of x and dy that a multiprocessor should have asked for at any time
_IN_FLIGHT = 48 * 2**10
_WIDE_BLOCK = 4096
_WIDE_DW = (4, 512, 4, 1, 4)
# a dense tensor needs no strides; saying so with None lets the compiler know the alignment of its rows
_DENSE = (None, None, None)


@lru_cache(maxsize=256)
def _tile(C: int) -> tuple[int, int, int]:
    """(rows, block, warps) of one tile: at least 2048 elements, 16 for each thread."""
    block = next_power_of_2(C)
    rows = max(1, 2048 // block)
    return rows, block, 32 if block > _WIDEST_TILE else warps_for(rows * block)


@lru_cache(maxsize=256)
def _backward_tile(C: int, itemsize: int, tensors: int, w_itemsize: int, room: int) -> tuple[int, int, int, int, int]:
    """(rows, block, warps, stages, programs for each multiprocessor) of the backward loop over rows.

    Three stages keep two tiles of each of the `tensors` on their way through shared memory (`room` bytes) while one is
    worked on, more where that is less than 48 KiB of x and dy; two stages are slower than none. A weight that is read
    again for each row goes the same way.
    """
    block = next_power_of_2(C)
    rows = max(1, 2048 // block)
    warps = min(rows * block // 512, 16)
    size = rows * block * itemsize
    programs = 1 if block >= 4096 else 16 // warps
    stages = max(3, 1 + cdiv(_IN_FLIGHT, 2 * size * programs))
    held = tensors * size + (block * w_itemsize if block >= _WIDE_TILE else 0)
    return rows, block, warps, stages if (stages - 1) * held <= room else 1, programs


@lru_cache(maxsize=16)
def _card(device: torch.device) -> tuple[int, int]:
    """(multiprocessors, bytes of shared memory for one program)."""
    if device.type != "cuda":
        # the interpreter gets two, so that a sum over programs is exercised there as well
        return 2, 2**20
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, getattr(properties, "shared_memory_per_block_optin", 2**16) - 2**12


@lru_cache(maxsize=256)
def _share(R: int, G: int, rows: int, programs: int) -> tuple[int, int]:
    """(rows a program, programs a group) for G groups of R rows in tiles of `rows`, if `programs` run at a time.

    One program too many would run alone after all others: so many for each group that the last turn is nearly full.
    """
    fewest = max(1, programs // G)
    full = {n: G * n / (cdiv(G * n, programs) * programs) for n in range(fewest, fewest + 8)}
    per_group = next((n for n in full if full[n] >= 0.95), max(full, key=full.__getitem__))
    per_program = cdiv(cdiv(R, min(per_group, cdiv(R, rows))), rows) * rows
    return per_program, cdiv(R, per_program)


def _rows(x: torch.Tensor | None) -> tuple[Any, ...]:
    """`x`, or a copy where its strides are beyond the kernels, and (inner, outer, step) of its rows."""
    if x is None or x.is_contiguous():
        return x, *_DENSE
    x, *strides = row_strides(x)
    return (x, *_DENSE) if strides == [1, x.shape[-1], 0] else (x, *strides)


def _weight(weight: torch.Tensor | None, groups: int, x: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """(C,) or (G, C) with unit column stride, and the step from group to group (0: shared)."""
    if weight is None:
        return None, 0
    w = fold_shared(weight, groups, x) if groups else weight
    if w.stride(-1) != 1:
        w = w.contiguous()
    return w, w.stride(0) if groups and w.shape[0] > 1 else 0


def rms_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    groups: int,
    eps: float,
    offset: float,
    round_first: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(norm, sum, 1 / rms); the sum is None without a residual."""
    order = memory_order(x, groups)
    if order is not None:
        x, residual = x.permute(order), None if residual is None else residual.permute(order)
    dtype = total = x.dtype
    if residual is not None:
        dtype = total = torch.promote_types(x.dtype, residual.dtype)
    if weight is not None and round_first:
        dtype = torch.promote_types(total, weight.dtype)
    y = dense_like(x, dtype)
    s = None if residual is None else dense_like(x, total)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if y.numel():
        _launch_forward(x, residual, weight, y, s, rstd, groups, eps, offset, round_first)
    if order is None:
        return y, s, rstd
    back = invert(order)
    return y.permute(back), None if s is None else s.permute(back), rstd.permute(back[:-1])


def _launch_forward(x, residual, weight, y, s, rstd, groups, eps, offset, round_first) -> None:
    C, rows = x.shape[-1], rstd.numel()
    w, w_step = _weight(weight, groups, x)
    R = rows // fold_groups(x, groups) if w_step else rows
    at, *x_rows = _rows(x)
    res, *res_rows = _rows(residual)
    meta = {"COLS": C, "OFFSET": offset, "ROUND": round_first and w is not None}
    if C > _WIDEST_ROW:
        args = (at, res, w, y, s, rstd, R, w_step, eps, *x_rows, *res_rows)
        launch(rms_norm_wide_fwd_kernel, (rows,), x, *args, **meta, BLOCK=_WIDE_BLOCK, num_warps=8)
        return
    tile, block, warps = _tile(C)
    args = (at, res, w, y, s, rstd, rows, R, w_step, eps, *x_rows, *res_rows)
    meta |= {"GROUPED": w_step != 0, "ROWS": tile, "BLOCK": block}
    launch(rms_norm_fwd_kernel, (cdiv(rows, tile),), x, *args, **meta, num_warps=warps)


def rms_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    dsum: torch.Tensor | None,
    need_dx: bool,
    need_dw: bool,
    groups: int,
    offset: float,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dx, dw): dx has the dtype and layout of x, `dsum` added in; dw has all groups, in the weight's dtype."""
    order = memory_order(x, groups)
    if order is not None:
        x, dy, rstd = x.permute(order), dy.permute(order), rstd.permute(order[:-1])
        dsum = None if dsum is None else dsum.permute(order)
    dx = dense_like(x) if need_dx else None
    dw = None
    if weight is not None and need_dw:
        shape = (*x.shape[:groups], x.shape[-1])
        dw = torch.empty(shape, dtype=weight.dtype, device=x.device) if groups else torch.empty_like(weight)
    if x.numel():
        _launch_backward(dy, x, weight, rstd.contiguous(), dsum, dx, dw, groups, offset)
    elif dw is not None:
        dw.zero_()
    return dx if order is None or dx is None else dx.permute(invert(order)), dw


def _launch_backward(dy, x, weight, rstd, dsum, dx, dw, groups, offset) -> None:
    C, rows, G = x.shape[-1], rstd.numel(), fold_groups(x, groups)
    w, w_step = _weight(weight, groups, x)
    at, *x_rows = _rows(x)
    dy, *dy_rows = _rows(dy)
    ds, *ds_rows = _rows(dsum)
    wide, (multiprocessors, room) = C > _WIDEST_TILE, _card(x.device)
    tensors, itemsize = 2 if ds is None else 3, max(x.element_size(), dy.element_size())
    tile, block, warps, stages, wave = (
        _WIDE_DW if wide else _backward_tile(C, itemsize, tensors, 0 if w is None else w.element_size(), room)
    )
    # without dw to add up, many short programs end together better than few long ones
    per_program, programs = _share(rows // G, G, tile, multiprocessors * (wave if dw is not None else 256 // warps))
    part = dw
    if dw is not None and programs > 1:
        part = torch.empty((G * programs, C), dtype=torch.float32, device=x.device)
    strides = (*x_rows, *dy_rows)
    if not wide:
        args = (dy, at, w, rstd, ds, dx, part, rows // G, per_program, programs, w_step, *strides, *ds_rows)
        meta = {"COLS": C, "OFFSET": offset, "ROWS": tile, "BLOCK": block, "STAGES": stages, "KEEP": block < _WIDE_TILE}
        launch(rms_norm_bwd_kernel, (G * programs,), x, *args, **meta, num_warps=warps)
    if wide and dx is not None:
        args = (dy, at, w, rstd, ds, dx, rows // G, w_step, *strides, *ds_rows)
        launch(rms_norm_wide_bwd_kernel, (rows,), x, *args, COLS=C, OFFSET=offset, BLOCK=_WIDE_BLOCK, num_warps=8)
    if wide and dw is not None:
        args = (dy, at, rstd, part, rows // G, per_program, programs, *strides)
        launch(
            rms_norm_wide_dw_kernel,
            (G * programs, cdiv(C, block)),
            x,
            *args,
            COLS=C,
            ROWS=tile,
            BLOCK=block,
            num_warps=warps,
        )
    if dw is not None and part is not dw:
        launch(rms_norm_dw_sum_kernel, (G, cdiv(C, 64)), x, part, dw, programs, COLS=C, ROWS=32, BLOCK=64, num_warps=4)
