"""Matrix products of rows (N, C), N = G * R, with weights that all groups share (C, n) or that they do not (G, C, n).

A shared weight is one product over all rows, whatever the number of groups. What is written to is a private buffer of
the caller. Leaves out autograd: these run inside a Function.
"""

from __future__ import annotations

import torch

from opake_kernels.fold import fold_shared

__all__ = ["cast", "fold_weight", "group_product", "matmul", "matmul_add_"]

# a product of half-precision matrices that returns its fp32 accumulator; torch has it on CUDA
_HAS_WIDE_OUTPUT = hasattr(torch.ops.aten.bmm, "dtype")


def fold_weight(w: torch.Tensor, groups: int, like: torch.Tensor) -> torch.Tensor:
    """A SHARED tensor (*groups or ones, ...) without its group dimensions where all share it, else with one of G.

    Shared also where the group dimensions are expanded views: the batched engine's parameters hold one value each, and
    only their gradients differ. Strides are looked at, never values. `like`: rows with all groups.
    """
    shared = w
    for _ in range(groups):
        size = shared.shape[0]
        if not size or (size != 1 and shared.stride(0) != 0):
            return fold_shared(w, groups, like)
        shared = shared[0]
    return shared


def cast(w: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`w` in `dtype`."""
    return w if w.dtype == dtype else w.to(dtype)


def matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """(N, C) @ (C, n) or (G, C, n) -> (N, n)."""
    if w.dim() == 2:
        return torch.mm(x, w)
    return torch.bmm(_by_group(x, w.shape[0]), w).flatten(0, 1)


def matmul_add_(
    out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, *, alpha: float = 1.0, beta: float = 1.0
) -> torch.Tensor:
    """out = beta * out + alpha * x @ w, into `out` (N, n) with rows at one stride; beta 0 ignores what was there."""
    if alpha == 0.0:
        # torch's batched product leaves `out` unwritten for alpha and beta 0 in bf16 on a CPU
        return out.zero_() if beta == 0.0 else out.mul_(beta)
    if w.dim() == 2:
        return out.addmm_(x, w, alpha=alpha, beta=beta)
    G = w.shape[0]
    _by_group(out, G).baddbmm_(_by_group(x, G), w, alpha=alpha, beta=beta)
    return out


def group_product(p: torch.Tensor, q: torch.Tensor, G: int, dtype: torch.dtype) -> torch.Tensor:
    """P^T Q of each group, (N, m) and (N, n) -> (G, m, n) in `dtype`, not rounded below it on the way."""
    wide = p.dtype.itemsize < dtype.itemsize
    keeps = wide and p.is_cuda and dtype == torch.float32 and _HAS_WIDE_OUTPUT
    if wide and not keeps:
        p, q = p.to(dtype), q.to(dtype)
    p, q = _by_group(p, G).mT, _by_group(q, G)
    return torch.bmm(p, q, out_dtype=dtype) if keeps else cast(torch.bmm(p, q), dtype)


def _by_group(x: torch.Tensor, G: int) -> torch.Tensor:
    return x.view(G, x.shape[0] // G if G else 0, x.shape[1])
