"""Per-row norms and the scaled sum of rows over many gradients at once, in two launches however many tensors there are.

The gradients of a LoRA model are hundreds of small (B, *shape) tensors; a handful of launches for each would cost more
than their arithmetic. Here a table of addresses goes to the device and each program finds its chunk in it. Squares are
summed in float64, in a fixed order and without atomics; the sum over rows is float32 (float64 for float64 gradients).
Nothing is copied and the gradients are only read. Choosing the scale is the caller's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .launch import jit, launch, tl, uses_triton

__all__ = [
    "add_scaled_rows",
    "add_scaled_rows_reference",
    "release_tables",
    "reserve_tables",
    "row_square_sums",
    "row_square_sums_reference",
]

CHUNK = 4096
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def row_square_sums_reference(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Plain PyTorch twin of `row_square_sums`."""
    return torch.stack([g.unsqueeze(-1).double().square().flatten(1).sum(1) for g in grads]).sum(0)


def add_scaled_rows_reference(
    totals: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], scale: torch.Tensor, dropped: torch.Tensor
) -> None:
    """Plain PyTorch twin of `add_scaled_rows`."""
    for total, grad in zip(totals, grads, strict=True):
        column = (-1, *(1 for _ in total.shape))
        rows = (grad.to(total.dtype) * scale.to(total.dtype).view(column)).masked_fill(dropped.view(column), 0)
        total.add_(rows.sum(0))


@jit
def _square_kernel(
    GRADS, SIZES, OWNER, START, OUT, chunks, DTYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    which = tl.load(OWNER + chunk)
    size, start = tl.load(SIZES + which), tl.load(START + chunk)
    base = tl.load(GRADS + which).to(tl.pointer_type(DTYPE)) + row * size  # pyright: ignore[reportArgumentType]
    total = tl.zeros((BLOCK,), tl.float64)
    for i in range(0, CHUNK, BLOCK):
        at = start + i + tl.arange(0, BLOCK)
        x = tl.load(base + at, mask=at < size, other=0.0).to(tl.float64)
        total += x * x
    tl.store(OUT + row * chunks + chunk, tl.sum(total, 0))


@jit
def _add_kernel(
    GRADS,
    TOTALS,
    SIZES,
    OWNER,
    START,
    SCALE,
    DROPPED,
    rows,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk = tl.program_id(0)
    which = tl.load(OWNER + chunk)
    size, start = tl.load(SIZES + which), tl.load(START + chunk)
    base = tl.load(GRADS + which).to(tl.pointer_type(DTYPE))  # pyright: ignore[reportArgumentType]
    out = tl.load(TOTALS + which).to(tl.pointer_type(tl.float32))
    for i in range(0, CHUNK, BLOCK):
        at = start + i + tl.arange(0, BLOCK)
        inside = at < size
        total = tl.load(out + at, mask=inside, other=0.0)
        for row in range(rows):
            gone = tl.load(DROPPED + row)
            # where, not &: the interpreter of Triton 3.9 takes no other mask
            x = tl.load(base + row * size + at, mask=tl.where(gone == 0, inside, False), other=0.0).to(tl.float32)
            total += x * tl.load(SCALE + row)
        tl.store(out + at, total, mask=inside)


class _Layout:
    """Where the chunks of a list of tensors lie; depends on sizes only, and is kept on the device."""

    def __init__(self, sizes: tuple[int, ...], device: torch.device) -> None:
        owners = [i for i, size in enumerate(sizes) for _ in range(-(-size // CHUNK))]
        starts = [start for size in sizes for start in range(0, size, CHUNK)]
        self.chunks = len(owners)
        self.sizes, self.owner, self.start = (
            torch.tensor(values, dtype=torch.int64, device=device) for values in (sizes, owners, starts)
        )


_layouts: dict[tuple[tuple[int, ...], torch.device], _Layout] = {}


def _layout(sizes: tuple[int, ...], device: torch.device) -> _Layout:
    key = (sizes, device)
    if key not in _layouts:
        # a handful of models live in a process; forget the oldest beyond that
        while len(_layouts) >= 32:
            _layouts.pop(next(iter(_layouts)))
        _layouts[key] = _Layout(sizes, device)
    return _layouts[key]


# host memory for tables inside a graph capture, which may not allocate any; a replay copies from it again, so what a
# graph was captured with stays where it is
_reserved: list[torch.Tensor] = []


def reserve_tables(count: int, length: int) -> list[torch.Tensor]:
    """Pinned host memory for `count` tables of up to `length` tensors, to be used by the next graph capture.

    The result must be kept as long as the graph; what the capture did not use is dropped with `release_tables`.
    """
    tables = [torch.empty(length, dtype=torch.int64, pin_memory=True) for _ in range(count)]
    _reserved.extend(tables)
    return tables


def release_tables() -> None:
    """Forget reserved tables that no capture took."""
    _reserved.clear()


def _addresses(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The data pointers as an int64 tensor on the device, without waiting for it."""
    table = torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64)
    if device.type != "cuda":
        return table
    if torch.cuda.is_current_stream_capturing():
        pinned = _reserved.pop()[: len(tensors)]
        pinned.copy_(table)
        return pinned.to(device, non_blocking=True)
    return table.pin_memory().to(device, non_blocking=True)


def _by_dtype(grads: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    for dtype in dict.fromkeys(g.dtype for g in grads):
        yield [i for i, g in enumerate(grads) if g.dtype == dtype and g.numel()]


def _row_sizes(grads: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Elements of a row of each; a view of one row would take as long as a small kernel."""
    return tuple(g.numel() // g.shape[0] for g in grads)


def _fused(grads: Sequence[torch.Tensor]) -> bool:
    first = grads[0]
    if first.is_cuda and torch.cuda.is_current_stream_capturing() and not _reserved:
        # somebody else's capture: there is no host memory that would outlive it
        return False
    return uses_triton(first) and all(
        g.dtype in _DTYPES and g.device == first.device and g.is_contiguous() for g in grads
    )


def row_square_sums(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of squares of each row over all gradients.

    grads: (B, *shape) each, one B and device; fp32, bf16 and fp16 on CUDA are fused, else the plain twin serves.
    Returns (B,) float64.
    """
    B = grads[0].shape[0]
    if not B or not _fused(grads):
        return row_square_sums_reference(grads)
    parts = []
    for places in _by_dtype(grads):
        chosen = [grads[i] for i in places]
        layout = _layout(_row_sizes(chosen), grads[0].device)
        out = torch.empty(B, layout.chunks, dtype=torch.float64, device=grads[0].device)
        where = (_addresses(chosen, out.device), layout.sizes, layout.owner, layout.start)
        meta = {"DTYPE": _triton_dtype(chosen[0].dtype), "CHUNK": CHUNK, "BLOCK": 1024}
        launch(_square_kernel, (layout.chunks, B), out, *where, out, layout.chunks, **meta)
        parts.append(out.sum(1))
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def add_scaled_rows(
    totals: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], scale: torch.Tensor, dropped: torch.Tensor
) -> None:
    """totals[i] += sum over rows b of scale[b] * grads[i][b], where dropped rows add exactly nothing, NaN or not.

    totals: float32 (or float64) of the gradients' shapes without B, written in place; scale: (B,) float32;
    dropped: (B,) bool.
    """
    plain = any(t.dtype != torch.float32 or not t.is_contiguous() for t in totals)
    if plain or not grads[0].shape[0] or not _fused(grads):
        add_scaled_rows_reference(totals, grads, scale, dropped)
        return
    gone, factor = dropped.to(torch.int32), scale.float().contiguous()
    for places in _by_dtype(grads):
        chosen = [grads[i] for i in places]
        layout = _layout(_row_sizes(chosen), grads[0].device)
        sums = _addresses([totals[i] for i in places], grads[0].device)
        where = (_addresses(chosen, grads[0].device), sums, layout.sizes, layout.owner, layout.start)
        meta = {"DTYPE": _triton_dtype(chosen[0].dtype), "CHUNK": CHUNK, "BLOCK": 1024}
        launch(_add_kernel, (layout.chunks,), factor, *where, factor, gone, grads[0].shape[0], **meta)


def _triton_dtype(dtype: torch.dtype) -> object:
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
