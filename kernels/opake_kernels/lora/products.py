"""Matrix products over groups: rows (G, R, C) with weights (1 | G, C, n), and per-group products of rows.

A weight that all groups share is one product over all rows. Everything here may write into its first argument alone,
which is a private buffer of the caller. Leaves out autograd: these run inside a Function.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from opake_kernels.fold import fold_shared

__all__ = ["cast_together", "cast_weight", "fold_weight", "group_product", "matmul", "matmul_add_"]

# a product of half-precision matrices that returns its fp32 accumulator; torch has it on CUDA
_HAS_WIDE_OUTPUT = hasattr(torch.ops.aten.bmm, "dtype")


def fold_weight(w: torch.Tensor, groups: int, x: torch.Tensor) -> torch.Tensor:
    """A SHARED tensor (*groups or ones, ...) as (1 | G, ...).

    One group also where the group dimensions are expanded views: the batched engine's parameters hold one value each,
    and only their gradients differ. Strides are looked at, never values.
    """
    if w.numel() and all(size == 1 or w.stride(i) == 0 for i, size in enumerate(w.shape[:groups])):
        return w[(0,) * groups].unsqueeze(0)
    return fold_shared(w, groups, x)


def cast_weight(w: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`w` in `dtype`; a copy only under autocast, where base weights may be wider than the rows."""
    return w if w.dtype == dtype else w.to(dtype)


def cast_together(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, whatever the dtypes, in one launch where the device has one."""
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    elif targets:
        torch._foreach_copy_(list(targets), list(sources))  # pyright: ignore[reportPrivateImportUsage]


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, 1)


def matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """(G, R, C) @ (1 | G, C, n) -> (G, R, n)."""
    if w.shape[0] != 1:
        return torch.bmm(x, w)
    return torch.mm(_flat(x), w[0]).view(x.shape[0], x.shape[1], w.shape[2])


def matmul_add_(
    out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, *, alpha: float = 1.0, beta: float = 1.0
) -> torch.Tensor:
    """out = beta * out + alpha * x @ w, into `out` (G, R, n) with rows at one stride; beta 0 ignores what was there."""
    if w.shape[0] != 1:
        return out.baddbmm_(x, w, alpha=alpha, beta=beta)
    out.view(out.shape[0] * out.shape[1], out.shape[2]).addmm_(_flat(x), w[0], alpha=alpha, beta=beta)
    return out


def group_product(p: torch.Tensor, q: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """P^T Q of each group, (G, R, m) and (G, R, n) -> (G, m, n) in `dtype`, not rounded below it on the way."""
    if p.dtype.itemsize < dtype.itemsize:
        if p.is_cuda and dtype == torch.float32 and _HAS_WIDE_OUTPUT:
            return torch.bmm(p.mT, q, out_dtype=dtype)
        p, q = p.to(dtype), q.to(dtype)
    if p.shape[0] == 1:
        return torch.mm(p[0].mT, q[0]).unsqueeze(0).to(dtype)
    return torch.bmm(p.mT, q).to(dtype)
