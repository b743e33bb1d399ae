"""Projections of one input, y_j = x W_j^T + s_j (x A_j) B_j + bias_j: forward and backward on plain tensors.

The input is read once for all low-rank factors: their A stand side by side, (H, sum of ranks). The low-rank term is
written first and the base product added onto it, so the accumulators of the large product do the addition and the sum
is rounded once. Adapters are cast down here, once a call, and their gradients leave in the parameter's own dtype.

Notation: X (N, H), the rows of all groups; W (O, H); A (H, r); B (r, O); Z = s X A, scaled, (N, sum of ranks). A weight
that differs between groups has a leading dimension of G. Gradients of weights always have it.
Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .ahead import beside, ready
from .products import cast, fold_weight, group_product, matmul, matmul_add_

__all__ = [
    "Projections",
    "backward",
    "factor_gradients",
    "forward",
    "gather",
    "input_gradient",
    "low_rank_gradients",
    "low_rank_rows",
    "outputs",
]

Weight = torch.Tensor | None


@dataclass(slots=True)
class Projections:
    """Folded weights of one call in the compute dtype; `A` holds all low-rank factors of the input side by side.

    One entry a projection; B is None and the columns are empty where there is no adapter. `columns`: those of each
    projection in A, Z and K. `dtypes`: those of A and B as given.
    """

    W: list[torch.Tensor]
    A: torch.Tensor
    B: list[Weight]
    columns: list[slice]
    scalings: tuple[float, ...]
    dtypes: list[tuple[torch.dtype, torch.dtype]]

    def shared(self) -> bool:
        """Whether no weight differs between groups."""
        return all(w is None or w.dim() == 2 for w in (*self.W, self.A, *self.B))


def gather(
    Ws: Sequence[torch.Tensor],
    As: Sequence[Weight],
    Bs: Sequence[Weight],
    scalings: tuple[float, ...],
    groups: int,
    like: torch.Tensor,
) -> Projections:
    """Fold and cast the weights of a call whose rows are `like` (*groups, ..., any)."""
    dtype = like.dtype
    columns, dtypes, start = [], [], 0
    for a, b in zip(As, Bs, strict=True):
        rank = 0 if a is None else a.shape[-1]
        columns.append(slice(start, start + rank))
        dtypes.append((dtype, dtype) if a is None or b is None else (a.dtype, b.dtype))
        start += rank
    W = [cast(fold_weight(w, groups, like), dtype) for w in Ws]
    A = [fold_weight(a, groups, like) for a in As if a is not None]
    factors = ready([*A, *[fold_weight(b, groups, like) for b in Bs if b is not None]], dtype, len(A))
    made = iter(factors[len(A) :])
    B = [None if b is None else next(made) for b in Bs]
    return Projections(W, _beside(factors[: len(A)], W[0]), B, columns, scalings, dtypes)


def _beside(A: list[torch.Tensor], w: torch.Tensor) -> torch.Tensor:
    """All factors as one (H, sum of ranks) or (G, H, sum of ranks), laid out as the PEFT weights they come from."""
    if len(A) == 1:
        return A[0]
    if A and (found := beside(A)) is not None:
        return found
    lead = next((a.shape[:1] for a in A if a.dim() == 3), ())
    buffer = torch.empty(*lead, sum(a.shape[-1] for a in A), w.shape[-1], dtype=w.dtype, device=w.device)
    start = 0
    for a in A:
        rank = a.shape[-1]
        buffer[..., start : start + rank, :].copy_(a.mT)
        start += rank
    return buffer.mT


def low_rank_rows(X: torch.Tensor, p: Projections) -> torch.Tensor:
    """Z (N, sum of ranks), each projection's columns scaled."""
    Z = X.new_empty(X.shape[0], p.A.shape[-1])
    used = [j for j, B in enumerate(p.B) if B is not None]
    if used and all(p.scalings[j] == p.scalings[used[0]] for j in used):
        return matmul_add_(Z, X, p.A, alpha=p.scalings[used[0]], beta=0.0)
    for j in used:
        matmul_add_(Z[:, p.columns[j]], X, p.A[..., p.columns[j]], alpha=p.scalings[j], beta=0.0)
    return Z


def forward(X: torch.Tensor, p: Projections, biases: Sequence[Weight]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The outputs (N, O_j) and Z; biases (O_j) or (G, O_j)."""
    Z = low_rank_rows(X, p)
    return outputs(X, Z, p, biases), Z


def outputs(X: torch.Tensor, Z: torch.Tensor, p: Projections, biases: Sequence[Weight]) -> list[torch.Tensor]:
    """The outputs (N, O_j) alone, from a Z that is known."""
    return [_project(X, Z[:, p.columns[j]], p.W[j], p.B[j], bias) for j, bias in enumerate(biases)]


def _project(X: torch.Tensor, Z: torch.Tensor, W: torch.Tensor, B: Weight, bias: Weight) -> torch.Tensor:
    if bias is not None and bias.dim() == 1 and W.dim() == 2:
        # the bias is free in the epilogue of the base product
        y = torch.addmm(cast(bias, X.dtype), X, W.mT)
        return y if B is None else matmul_add_(y, Z, B)
    if B is None:
        y = matmul(X, W.mT)
    else:
        y = matmul_add_(matmul_add_(X.new_empty(X.shape[0], W.shape[-2]), Z, B, beta=0.0), X, W.mT)
    if bias is not None:
        G = bias.shape[0] if bias.dim() == 2 else 1
        y.view(G, y.shape[0] // G if G else 0, y.shape[1]).add_(cast(bias, X.dtype).view(G, 1, y.shape[1]))
    return y


@dataclass(slots=True)
class Gradients:
    """x (N, H) in the compute dtype; of weights (G, ...) in the parameters' dtypes; None where not asked for."""

    x: Weight
    A: list[Weight]
    B: list[Weight]
    bias: list[Weight]


def backward(
    D: Sequence[torch.Tensor],
    X: Weight,
    Z: torch.Tensor,
    p: Projections,
    G: int,
    need_x: bool,
    need_a: Sequence[bool],
    need_b: Sequence[bool],
    need_bias: Sequence[torch.dtype | None],
) -> Gradients:
    """From D_j (N, O_j); `need_bias`: the dtype of each bias gradient wanted. X may be None if no A needs one."""
    K = low_rank_gradients(D, p) if need_x or any(need_a) else None
    return Gradients(
        input_gradient(D, K, p) if need_x and K is not None else None,
        factor_gradients(K, X, p, G, need_a),
        [group_product(d, Z[:, p.columns[j]], G, p.dtypes[j][1]).mT if need_b[j] else None for j, d in enumerate(D)],
        [None if dtype is None else _bias_gradient(d, G, dtype) for d, dtype in zip(D, need_bias, strict=True)],
    )


def _bias_gradient(d: torch.Tensor, G: int, dtype: torch.dtype) -> torch.Tensor:
    R = d.shape[0] // G if G else 0
    return cast(d.view(G, R, d.shape[1]).sum(1, dtype=torch.promote_types(d.dtype, torch.float32)), dtype)


def low_rank_gradients(D: Sequence[torch.Tensor], p: Projections, out: Weight = None) -> torch.Tensor:
    """K (N, sum of ranks), K_j = s_j D_j B_j^T: the gradient with respect to X A."""
    K = D[0].new_empty(D[0].shape[0], p.A.shape[-1]) if out is None else out
    for j, B in enumerate(p.B):
        if B is not None:
            matmul_add_(K[:, p.columns[j]], D[j], B.mT, alpha=p.scalings[j], beta=0.0)
    return K


def input_gradient(D: Sequence[torch.Tensor], K: torch.Tensor, p: Projections, out: Weight = None) -> torch.Tensor:
    """dX = K A^T + sum over j of D_j W_j, accumulated in one buffer."""
    if out is None:
        out = D[0].new_empty(D[0].shape[0], p.W[0].shape[-1])
    started = 0.0
    if K.shape[1]:
        matmul_add_(out, K, p.A.mT, beta=0.0)
        started = 1.0
    for d, W in zip(D, p.W, strict=True):
        matmul_add_(out, d, W, beta=started)
        started = 1.0
    return out


def factor_gradients(K: Weight, X: Weight, p: Projections, G: int, need_a: Sequence[bool]) -> list[Weight]:
    """dA_j (G, H, r) where asked for, in one pass over X if all of them are."""
    found: list[Weight] = [None] * len(p.W)
    wanted = [j for j, need in enumerate(need_a) if need]
    if not wanted or K is None or X is None:
        return found
    used = [j for j, B in enumerate(p.B) if B is not None]
    if wanted == used and all(p.dtypes[j][0] == p.dtypes[used[0]][0] for j in used):
        every = group_product(K, X, G, p.dtypes[used[0]][0])
        for j in wanted:
            found[j] = every[:, p.columns[j]].mT
        return found
    for j in wanted:
        found[j] = group_product(K[:, p.columns[j]], X, G, p.dtypes[j][0]).mT
    return found
