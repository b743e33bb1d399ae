"""Log-probabilities of chosen classes: log_softmax(logits).gather(-1, indices) without the log_softmax.

One pass over the logits forward, one backward, as in cross_entropy.py, for K chosen classes a row (policy-gradient
losses, distillation on a few classes). Leaves out scaling, masking and reduction.
"""

from __future__ import annotations

from typing import Any

import torch

from .checks import check_float, check_index, check_same_device, check_shape
from .fold import ROWS, function_pair
from .labels import look_at_labels
from .launch import cdiv, jit, launch, next_power_of_2, tl, uses_triton
from .row_softmax import aligned_start, grad_tile, row_log_softmax_parts, row_tile
from .strided_rows import dense_like, row_strides

__all__ = ["opake_selective_log_softmax", "selective_log_softmax_reference"]


def selective_log_softmax_reference(
    logits: torch.Tensor, indices: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The plain twin of `opake_selective_log_softmax`; `dtype` of the result, by default that of the logits."""
    z = torch.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
    valid = (indices >= 0) & (indices < logits.shape[-1])
    chosen = z.gather(-1, torch.where(valid, indices, 0).long())
    return (chosen * torch.where(valid, 1.0, torch.nan).to(z.dtype)).to(dtype or logits.dtype)


@jit
def selective_log_softmax_fwd_kernel(
    L, I, OUT, LSE, V, K, inner, outer, step, KB: tl.constexpr, T: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = (row // inner) * outer + (row % inner) * step
    top, log_sum, _ = row_log_softmax_parts(L, start, V, 1.0, 0.0, False, False, T, W)  # pyright: ignore
    tl.store(LSE + row * 2, top)
    tl.store(LSE + row * 2 + 1, log_sum)
    k = tl.arange(0, KB)
    index = tl.load(I + row * K + k, mask=k < K, other=-1)
    valid = (index >= 0) & (index < V)
    z = tl.load(L + start + tl.where(valid, index, 0), mask=valid, other=0.0).to(tl.float32)
    tl.store(OUT + row * K + k, tl.where(valid, (z - top) - log_sum, float("nan")), mask=k < K)


@jit
def _chosen_grad(x, top, log_sum, total, I, G, K, shift, at, lane):
    """sum_k g_k (onehot_k - softmax) on one tile; `total` is the sum of g_k, NaN with an index out of range."""
    d = -total * tl.exp((x.to(tl.float32) - top) - log_sum)
    for k in range(K):
        index = tl.load(I + k)
        d += tl.where(lane == (index + shift - at).to(tl.int32), tl.load(G + k).to(tl.float32), 0.0)
    return d


@jit
def selective_log_softmax_bwd_kernel(
    L, I, LSE, G, D, V, K, NB, inner, outer, step,
    DENSE: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """TILES tiles of one row a program, as in cross_entropy.py."""
    program = tl.program_id(0)
    row = (program // NB).to(tl.int64)
    aligned, shift = aligned_start(row * V, W)  # pyright: ignore
    top, log_sum = tl.load(LSE + row * 2), tl.load(LSE + row * 2 + 1)
    total = 0.0
    for k in range(K):
        index = tl.load(I + row * K + k)
        g = tl.load(G + row * K + k).to(tl.float32)
        total += tl.where((index >= 0) & (index < V), g, float("nan"))
    lane = tl.arange(0, BLOCK)
    begin = (program % NB) * (TILES * BLOCK)
    end = V + shift
    from_row = (row // inner) * outer + (row % inner) * step - shift
    source = L + aligned if DENSE else L + from_row
    for at in range(begin, tl.minimum(begin + TILES * BLOCK, end), BLOCK):
        out = D + aligned + at + lane
        if (at >= shift) & (at + BLOCK <= end):
            x = tl.load(source + at + lane)
            tl.store(out, _chosen_grad(x, top, log_sum, total, I + row * K, G + row * K, K, shift, at, lane))
        else:
            inside = (lane >= shift - at) & (lane < end - at)
            x = tl.load(source + at + lane, mask=inside, other=0.0)
            d = _chosen_grad(x, top, log_sum, total, I + row * K, G + row * K, K, shift, at, lane)
            tl.store(out, d, mask=inside)


def _forward(logits: torch.Tensor, indices: torch.Tensor, groups: int, dtype: torch.dtype) -> Any:
    out = torch.empty(indices.shape, dtype=dtype, device=logits.device)
    lse = torch.empty((*logits.shape[:-1], 2), dtype=torch.float32, device=logits.device)
    x, inner, outer, step = row_strides(logits)
    K = indices.shape[-1]
    launch(
        selective_log_softmax_fwd_kernel, (lse.numel() // 2,), x, x, indices.contiguous(), out, lse, x.shape[-1], K,
        inner, outer, step, KB=next_power_of_2(K), **row_tile(x),
    )  # fmt: skip
    return out, lse


def _backward(grads: Any, saved: Any, need: Any, groups: int, dtype: torch.dtype) -> Any:
    (g,), (logits, indices, lse) = grads, saved
    V = logits.shape[-1]
    d = dense_like(logits)
    x, inner, outer, step = row_strides(logits)
    tile = grad_tile(d)
    NB = cdiv(V + tile["W"] - 1, tile["BLOCK"] * tile["TILES"])
    launch(
        selective_log_softmax_bwd_kernel, (lse.numel() // 2 * NB,), x, x, indices.contiguous(), lse.contiguous(),
        g.contiguous(), d, V, indices.shape[-1], NB, inner, outer, step, DENSE=x.is_contiguous(), **tile,
    )  # fmt: skip
    return [d, None]


_pair = function_pair(
    "opake_selective_log_softmax",
    forward=_forward,
    backward=_backward,
    roles=(ROWS, ROWS),
    save_inputs=(0, 1),
    save_outputs=(1,),
    stats=1,
    outline=lambda logits, indices, groups, dtype: [
        (indices.shape, dtype),
        ((*logits.shape[:-1], 2), torch.float32),
    ],
)


def opake_selective_log_softmax(logits: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """log_softmax(logits, -1).gather(-1, indices), computed in fp32 and rounded once, without the log_softmax.

    logits: (..., V) floating, V >= 1, left intact. indices: (..., K) int64 or int32, or (...) for one class a row.
    Returns the shape of `indices`, the dtype of `logits` (fp32 under CUDA autocast). An index out of range
    is a ValueError where looking costs no device read, else its result is NaN. Raises TypeError (dtype), ValueError.
    """
    op = "opake_selective_log_softmax"
    check_float(op, logits=logits)
    check_index(op, indices=indices)
    check_same_device(op, logits=logits, indices=indices)
    if not logits.dim() or not logits.shape[-1]:
        raise ValueError(f"{op}: logits have shape {tuple(logits.shape)}, expected (..., V) with V >= 1")
    if indices.dim() == logits.dim() - 1:
        return opake_selective_log_softmax(logits, indices.unsqueeze(-1)).squeeze(-1)
    if indices.dim() != logits.dim():
        raise ValueError(f"{op}: indices have shape {tuple(indices.shape)}, logits {tuple(logits.shape)}")
    check_shape(op, "indices[:-1]", indices.shape[:-1], logits.shape[:-1], "the leading dimensions of logits")
    look_at_labels(op, indices, logits.shape[-1])
    dtype = logits.dtype
    if logits.is_cuda and torch.is_autocast_enabled("cuda"):
        dtype = torch.promote_types(dtype, torch.float32)
    if not uses_triton(logits, indices):
        return selective_log_softmax_reference(logits, indices, dtype)
    return _pair(logits, indices, 0, dtype)[0]
