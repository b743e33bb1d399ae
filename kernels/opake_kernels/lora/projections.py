"""Projections of one input, y_j = x W_j^T + s_j (x A_j) B_j + bias_j: forward and backward on plain tensors.

The input is read once for all low-rank factors: their A stand side by side, (H, sum of ranks). The low-rank term is
written first and the base product added onto it, so the accumulators of the large product do the addition and the sum
is rounded once. Adapters are cast down here, once a call, and their gradients leave in the parameter's own dtype.

Notation: X (G, R, H); W (1, O, H); A (1|G, H, r); B (1|G, r, O); Z = s X A, scaled, (G, R, sum of ranks). W, A and B of
one group are the common case: then every product but those of the adapter gradients runs over all rows.
Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .products import cast_together, cast_weight, fold_weight, group_product, matmul, matmul_add_

__all__ = ["Projections", "backward", "factor_gradients", "forward", "gather", "low_rank_rows"]

Weight = torch.Tensor | None


@dataclass(slots=True)
class Projections:
    """Folded weights of one call in the compute dtype; `A` holds all low-rank factors of the input side by side.

    One entry a projection; B is None and the rank 0 where there is no adapter. `dtypes`: those of A and B as given.
    """

    W: list[torch.Tensor]
    A: torch.Tensor
    B: list[Weight]
    ranks: list[int]
    scalings: tuple[float, ...]
    dtypes: list[tuple[torch.dtype, torch.dtype]]

    def columns(self, j: int) -> slice:
        """The columns of projection j in `A`, Z and K."""
        start = sum(self.ranks[:j])
        return slice(start, start + self.ranks[j])


def gather(
    Ws: Sequence[torch.Tensor],
    As: Sequence[Weight],
    Bs: Sequence[Weight],
    scalings: tuple[float, ...],
    groups: int,
    x: torch.Tensor,
) -> Projections:
    """Fold and cast the weights of `x` (*groups, ..., H); the adapters in one launch."""
    dtype = x.dtype
    W = [cast_weight(fold_weight(w, groups, x), dtype) for w in Ws]
    A = [None if a is None else fold_weight(a, groups, x) for a in As]
    B = [None if b is None else fold_weight(b, groups, x) for b in Bs]
    ranks = [0 if a is None else a.shape[2] for a in A]
    dtypes = [(dtype, dtype) if a is None or b is None else (a.dtype, b.dtype) for a, b in zip(A, B, strict=True)]
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    side_by_side = _beside([a for a in A if a is not None], dtype, W[0], targets, sources)
    for j, b in enumerate(B):
        if b is not None and b.dtype != dtype:
            B[j] = torch.empty_like(b, dtype=dtype)
            targets.append(B[j])  # type: ignore[arg-type]
            sources.append(b)
    cast_together(targets, sources)
    return Projections(W, side_by_side, B, ranks, scalings, dtypes)


def _beside(
    A: list[torch.Tensor], dtype: torch.dtype, w: torch.Tensor, targets: list[torch.Tensor], sources: list[torch.Tensor]
) -> torch.Tensor:
    """(1|G, H, sum of ranks): a lone factor as it is, else a buffer that the copies added to the lists will fill."""
    if len(A) == 1 and A[0].dtype == dtype:
        return A[0]
    G = max([a.shape[0] for a in A], default=1)
    # kept as (ranks, H), the layout of the PEFT weight of which A is the transpose
    buffer = torch.empty(G, sum(a.shape[2] for a in A), w.shape[2], dtype=dtype, device=w.device)
    start = 0
    for a in A:
        target = buffer[:, start : start + a.shape[2]]
        targets.append(target)
        sources.append(a.mT.expand(target.shape))
        start += a.shape[2]
    return buffer.mT


def low_rank_rows(X: torch.Tensor, p: Projections) -> torch.Tensor:
    """Z (G, R, sum of ranks), each projection's columns scaled."""
    Z = torch.empty(*X.shape[:2], p.A.shape[2], dtype=X.dtype, device=X.device)
    used = [j for j, rank in enumerate(p.ranks) if rank]
    if len({p.scalings[j] for j in used}) == 1:
        return matmul_add_(Z, X, p.A, alpha=p.scalings[used[0]], beta=0.0)
    for j in used:
        matmul_add_(Z[..., p.columns(j)], X, p.A[..., p.columns(j)], alpha=p.scalings[j], beta=0.0)
    return Z


def forward(X: torch.Tensor, p: Projections, biases: Sequence[Weight]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The outputs (G, R, O_j) and Z; biases (1|G, O_j)."""
    Z = low_rank_rows(X, p)
    return [_project(X, Z[..., p.columns(j)], p.W[j], p.B[j], bias) for j, bias in enumerate(biases)], Z


def _project(X: torch.Tensor, Z: torch.Tensor, W: torch.Tensor, B: Weight, bias: Weight) -> torch.Tensor:
    if bias is not None and bias.shape[0] == 1 and W.shape[0] == 1:
        # the bias is free in the epilogue of the base product
        bias = cast_weight(bias, X.dtype)
        y = torch.addmm(bias[0], X.flatten(0, 1), W[0].mT).view(*X.shape[:2], W.shape[1])
        return y if B is None else matmul_add_(y, Z, B)
    if B is None:
        y = matmul(X, W.mT)
    else:
        y = torch.empty(*X.shape[:2], W.shape[1], dtype=X.dtype, device=X.device)
        matmul_add_(matmul_add_(y, Z, B, beta=0.0), X, W.mT)
    return y if bias is None else y.add_(cast_weight(bias, X.dtype).unsqueeze(1))


@dataclass(slots=True)
class Gradients:
    """(G, ...) gradients in the parameters' dtypes, None where not asked for; x in the compute dtype."""

    x: Weight
    A: list[Weight]
    B: list[Weight]
    bias: list[Weight]


def backward(
    D: Sequence[torch.Tensor],
    X: Weight,
    Z: torch.Tensor,
    p: Projections,
    need_x: bool,
    need_a: Sequence[bool],
    need_b: Sequence[bool],
    need_bias: Sequence[torch.dtype | None],
) -> Gradients:
    """From D_j (G, R, O_j); `need_bias`: the dtype of each bias gradient wanted. X may be None if no A needs one."""
    K = low_rank_gradients(D, p) if need_x or any(need_a) else None
    return Gradients(
        input_gradient(D, K, p) if need_x and K is not None else None,
        factor_gradients(K, X, p, need_a),
        [group_product(d, Z[..., p.columns(j)], p.dtypes[j][1]).mT if need_b[j] else None for j, d in enumerate(D)],
        [
            None if dtype is None else d.sum(1, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
            for d, dtype in zip(D, need_bias, strict=True)
        ],
    )


def low_rank_gradients(D: Sequence[torch.Tensor], p: Projections, out: torch.Tensor | None = None) -> torch.Tensor:
    """K (G, R, sum of ranks), K_j = s_j D_j B_j^T: the gradient with respect to X A."""
    d = D[0]
    K = torch.empty(*d.shape[:2], p.A.shape[2], dtype=d.dtype, device=d.device) if out is None else out
    for j, B in enumerate(p.B):
        if B is not None:
            matmul_add_(K[..., p.columns(j)], D[j], B.mT, alpha=p.scalings[j], beta=0.0)
    return K


def input_gradient(
    D: Sequence[torch.Tensor], K: torch.Tensor, p: Projections, out: torch.Tensor | None = None
) -> torch.Tensor:
    """dX = K A^T + sum over j of D_j W_j, accumulated in one buffer."""
    if out is None:
        out = torch.empty(*D[0].shape[:2], p.W[0].shape[2], dtype=D[0].dtype, device=D[0].device)
    started = 0.0
    if K.shape[2]:
        matmul_add_(out, K, p.A.mT, beta=0.0)
        started = 1.0
    for d, W in zip(D, p.W, strict=True):
        matmul_add_(out, d, W, beta=started)
        started = 1.0
    return out


def factor_gradients(K: Weight, X: Weight, p: Projections, need_a: Sequence[bool]) -> list[Weight]:
    wanted = [j for j, need in enumerate(need_a) if need]
    found: list[Weight] = [None] * len(p.ranks)
    if not wanted or K is None or X is None:
        return found
    used = [j for j, rank in enumerate(p.ranks) if rank]
    if wanted == used and len({p.dtypes[j][0] for j in used}) == 1:
        # one pass over X for all of them
        parts = group_product(K, X, p.dtypes[used[0]][0]).split([p.ranks[j] for j in used], 1)
    else:
        parts = [group_product(K[..., p.columns(j)], X, p.dtypes[j][0]) for j in wanted]
    for j, part in zip(wanted, parts, strict=True):
        found[j] = part.mT
    return found
