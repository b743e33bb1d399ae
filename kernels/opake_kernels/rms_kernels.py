"""Triton kernels of RMSNorm, with or without a residual addition in front; the ops are rms_norm.py and add_rms_norm.py.

Forward reads a row once and keeps 1 / rms. Backward gives one program a run of rows of ONE group: it writes their dx
and adds up their share of dw in fp32 registers, so a weight gradient is a segment reduction per group, without
atomics, the same every time. Rows wider than a tile are walked twice in the `wide` kernels (the second pass meets the
cache), and dw gets its own kernel.
Leaves out anything about devices, strides and dtypes: that is rms_launch.py.
"""

from __future__ import annotations

from .launch import jit, tl

__all__ = [
    "rms_norm_bwd_kernel",
    "rms_norm_dw_sum_kernel",
    "rms_norm_fwd_kernel",
    "rms_norm_wide_bwd_kernel",
    "rms_norm_wide_dw_kernel",
    "rms_norm_wide_fwd_kernel",
]

_SIZES = ["rows", "rows_per_group", "per_program", "programs"]


@jit(do_not_specialize=_SIZES)
def rms_norm_fwd_kernel(
    X, RES, W, Y, SUM, RSTD, rows, rows_per_group, w_step, eps,
    x_inner, x_outer, x_step, r_inner, r_outer, r_step,
    COLS: tl.constexpr, OFFSET: tl.constexpr, ROUND: tl.constexpr, GROUPED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    ok = row < rows
    live = ok[:, None] & (col < COLS)[None, :]
    x_at = row * COLS if x_inner is None else (row // x_inner) * x_outer + (row % x_inner) * x_step
    x = tl.load(X + x_at[:, None] + col[None, :], live, 0.0)
    if RES is not None:
        r_at = row * COLS if r_inner is None else (row // r_inner) * r_outer + (row % r_inner) * r_step
        r = tl.load(RES + r_at[:, None] + col[None, :], live, 0.0)
        # the sum is rounded before it is normalised, as where the addition is an op of its own
        x = (x.to(tl.float32) + r.to(tl.float32)).to(SUM.dtype.element_ty)
        tl.store(SUM + row[:, None] * COLS + col[None, :], x, live)
    kind = x.dtype
    x = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / COLS + eps)
    tl.store(RSTD + row, rstd, ok)
    y = x * rstd[:, None]
    if ROUND:
        y = y.to(kind).to(tl.float32)
    if W is not None:
        if GROUPED:
            at = (row // rows_per_group * w_step)[:, None] + col[None, :]
            w = tl.load(W + at, live, 0.0).to(tl.float32)
        else:
            w = tl.load(W + col, col < COLS, 0.0).to(tl.float32)[None, :]
        y = y * (w + OFFSET)
    tl.store(Y + row[:, None] * COLS + col[None, :], y, live)


@jit(do_not_specialize=_SIZES)
def rms_norm_bwd_kernel(
    DY, X, W, RSTD, DSUM, DX, PART, rows_per_group, per_program, programs, w_step,
    x_inner, x_outer, x_step, y_inner, y_outer, y_step, s_inner, s_outer, s_step,
    COLS: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    group = program // programs
    first = (program % programs) * per_program
    last = tl.minimum(first + per_program, rows_per_group)
    col = tl.arange(0, BLOCK)
    # without KEEP a row leaves no registers for the weight: it is read again for each, from the cache
    if W is not None and KEEP:
        w = tl.load(W + group * w_step + col, col < COLS, 0.0).to(tl.float32)[None, :] + OFFSET
    if PART is not None:
        acc = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        local = start + tl.arange(0, ROWS)
        ok = local < last
        row = group * rows_per_group + local
        live = ok[:, None] & (col < COLS)[None, :]
        x_at = row * COLS if x_inner is None else (row // x_inner) * x_outer + (row % x_inner) * x_step
        y_at = row * COLS if y_inner is None else (row // y_inner) * y_outer + (row % y_inner) * y_step
        x = tl.load(X + x_at[:, None] + col[None, :], live, 0.0)
        dy = tl.load(DY + y_at[:, None] + col[None, :], live, 0.0)
        rstd = tl.load(RSTD + row, ok, 0.0)[:, None]
        dy = dy.to(tl.float32)
        xhat = x.to(tl.float32) * rstd
        if PART is not None:
            acc += dy * xhat
        if DX is not None:
            if W is not None:
                if not KEEP:
                    w = tl.load(W + group * w_step + col, col < COLS, 0.0).to(tl.float32)[None, :] + OFFSET
                dy = dy * w
            dx = (dy - xhat * (tl.sum(dy * xhat, 1) / COLS)[:, None]) * rstd
            if DSUM is not None:
                s_at = row * COLS if s_inner is None else (row // s_inner) * s_outer + (row % s_inner) * s_step
                dx += tl.load(DSUM + s_at[:, None] + col[None, :], live, 0.0).to(tl.float32)
            tl.store(DX + row[:, None] * COLS + col[None, :], dx, live)
    if PART is not None:
        if ROWS > 8:
            # in two steps: shorter chains of additions, smaller errors
            acc = tl.sum(tl.reshape(acc, (ROWS // 8, 8, BLOCK)), 0)
        tl.store(PART + program * COLS + col, tl.sum(acc, 0), col < COLS)


@jit(do_not_specialize=_SIZES)
def rms_norm_wide_fwd_kernel(
    X, RES, W, Y, SUM, RSTD, rows_per_group, w_step, eps,
    x_inner, x_outer, x_step, r_inner, r_outer, r_step,
    COLS: tl.constexpr, OFFSET: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    X += row * COLS if x_inner is None else (row // x_inner) * x_outer + (row % x_inner) * x_step
    if RES is not None:
        RES += row * COLS if r_inner is None else (row // r_inner) * r_outer + (row % r_inner) * r_step
    square = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, COLS, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(X + col, col < COLS, 0.0)
        if RES is not None:
            r = tl.load(RES + col, col < COLS, 0.0)
            x = (x.to(tl.float32) + r.to(tl.float32)).to(SUM.dtype.element_ty)
            tl.store(SUM + row * COLS + col, x, col < COLS)
        x = x.to(tl.float32)
        square += x * x
    rstd = tl.rsqrt(tl.sum(square, 0) / COLS + eps)
    tl.store(RSTD + row, rstd)
    for start in range(0, COLS, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(X + col, col < COLS, 0.0)
        if RES is not None:
            # added again from the inputs: the stored sum need not be visible to other threads yet
            r = tl.load(RES + col, col < COLS, 0.0)
            x = (x.to(tl.float32) + r.to(tl.float32)).to(SUM.dtype.element_ty)
        y = x.to(tl.float32) * rstd
        if ROUND:
            y = y.to(x.dtype).to(tl.float32)
        if W is not None:
            w = tl.load(W + row // rows_per_group * w_step + col, col < COLS, 0.0)
            y = y * (w.to(tl.float32) + OFFSET)
        tl.store(Y + row * COLS + col, y, col < COLS)


@jit(do_not_specialize=_SIZES)
def rms_norm_wide_bwd_kernel(
    DY, X, W, RSTD, DSUM, DX, rows_per_group, w_step,
    x_inner, x_outer, x_step, y_inner, y_outer, y_step, s_inner, s_outer, s_step,
    COLS: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    X += row * COLS if x_inner is None else (row // x_inner) * x_outer + (row % x_inner) * x_step
    DY += row * COLS if y_inner is None else (row // y_inner) * y_outer + (row % y_inner) * y_step
    if DSUM is not None:
        DSUM += row * COLS if s_inner is None else (row // s_inner) * s_outer + (row % s_inner) * s_step
    rstd = tl.load(RSTD + row)
    dots = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, COLS, BLOCK):
        col = start + tl.arange(0, BLOCK)
        dy = tl.load(DY + col, col < COLS, 0.0).to(tl.float32)
        if W is not None:
            dy *= tl.load(W + row // rows_per_group * w_step + col, col < COLS, 0.0).to(tl.float32) + OFFSET
        dots += dy * tl.load(X + col, col < COLS, 0.0).to(tl.float32)
    mean = tl.sum(dots, 0) * rstd / COLS
    for start in range(0, COLS, BLOCK):
        col = start + tl.arange(0, BLOCK)
        dy = tl.load(DY + col, col < COLS, 0.0).to(tl.float32)
        if W is not None:
            dy *= tl.load(W + row // rows_per_group * w_step + col, col < COLS, 0.0).to(tl.float32) + OFFSET
        dx = (dy - tl.load(X + col, col < COLS, 0.0).to(tl.float32) * rstd * mean) * rstd
        if DSUM is not None:
            dx += tl.load(DSUM + col, col < COLS, 0.0).to(tl.float32)
        tl.store(DX + row * COLS + col, dx, col < COLS)


@jit(do_not_specialize=_SIZES)
def rms_norm_wide_dw_kernel(
    DY, X, RSTD, PART, rows_per_group, per_program, programs,
    x_inner, x_outer, x_step, y_inner, y_outer, y_step,
    COLS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    group = program // programs
    first = (program % programs) * per_program
    last = tl.minimum(first + per_program, rows_per_group)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(first, last, ROWS):
        local = start + tl.arange(0, ROWS)
        row = group * rows_per_group + local
        live = (local < last)[:, None] & (col < COLS)[None, :]
        x_at = row * COLS if x_inner is None else (row // x_inner) * x_outer + (row % x_inner) * x_step
        y_at = row * COLS if y_inner is None else (row // y_inner) * y_outer + (row % y_inner) * y_step
        x = tl.load(X + x_at[:, None] + col[None, :], live, 0.0)
        dy = tl.load(DY + y_at[:, None] + col[None, :], live, 0.0)
        acc += dy.to(tl.float32) * x.to(tl.float32) * tl.load(RSTD + row, local < last, 0.0)[:, None]
    tl.store(PART + program * COLS + col, tl.sum(acc, 0), col < COLS)


@jit(do_not_specialize=_SIZES)
def rms_norm_dw_sum_kernel(PART, DW, programs, COLS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(G, programs, COLS) fp32 partial sums -> (G, COLS) in the weight's dtype, in a fixed order."""
    group = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, programs, ROWS):
        p = start + tl.arange(0, ROWS)
        at = (group * programs + p)[:, None] * COLS + col[None, :]
        acc += tl.load(PART + at, (p < programs)[:, None] & (col < COLS)[None, :], 0.0)
    tl.store(DW + group * COLS + col, tl.sum(acc, 0), col < COLS)
