"""One projection with a LoRA adapter: y = x W^T + (x A) B s + bias.

Leaves out dropout, DoRA and quantised weights: whoever has them keeps the unfused form.
Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from opake_kernels.fold import ROWS, SHARED, function_pair

from . import projections
from .arguments import check_precision, check_projections, leading_axis, takes_twin, with_axis
from .products import fold_weight
from .rows import flat_rows, group_count, like_groups, trace, unflat_rows

__all__ = ["lora_w_reference", "opake_lora_w", "projection_pair"]

Weight = torch.Tensor | None


def lora_w_reference(
    X: torch.Tensor,
    W: torch.Tensor,
    A: Weight,
    B: Weight,
    scaling: float,
    bias: Weight = None,
    *,
    lora_precision: str = "compute",
) -> torch.Tensor:
    """The plain twin of `opake_lora_w`."""
    rows, wide = X, A is not None and B is not None and (A.dim() == 3 or B.dim() == 3)
    if wide or (bias is not None and bias.dim() == 2):
        # an example axis of the adapters meets the first dimension of the rows
        rows = X.reshape(X.shape[0], math.prod(X.shape[1:-1]), X.shape[-1])
    shared = bias.to(rows.dtype) if bias is not None and bias.dim() == 1 else None
    y = functional.linear(rows, W.to(rows.dtype), shared)
    y = y if bias is None or shared is not None else y + bias.to(y.dtype).unsqueeze(1)
    if A is not None and B is not None:
        dtype = A.dtype if lora_precision == "param" else rows.dtype
        y = (y + ((rows.to(dtype) @ A.to(dtype)) @ B.to(dtype)) * scaling).to(y.dtype)
    return y.reshape(*X.shape[:-1], W.shape[0])


def _forward(x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    """args: W, A, B, bias of each projection, then groups and scalings -> the outputs, a trace and Z."""
    *weights, groups, scalings = args
    p = projections.gather(weights[0::4], weights[1::4], weights[2::4], scalings, groups, x)
    biases = [None if b is None else fold_weight(b, groups, x) for b in weights[3::4]]
    outputs, Z = projections.forward(flat_rows(x), p, biases)
    lead = x.shape[:-1]
    return *[unflat_rows(y, lead) for y in outputs], trace(x, groups), Z.view(*lead, Z.shape[1])


def _backward(
    grads: Sequence[Weight], saved: Sequence[Any], need: Sequence[bool], groups: int, scalings: tuple[float, ...]
) -> list[Weight]:
    x, *weights, _, z = saved
    n = len(scalings)
    Ws, As, Bs, biases = weights[0:n], weights[n : 2 * n], weights[2 * n : 3 * n], weights[3 * n :]
    given = _all_given(grads[:n], Ws)
    lead = given[0].shape[:-1]
    found = projections.backward(
        [flat_rows(d) for d in given],
        None if x is None else flat_rows(x),
        flat_rows(z),
        projections.gather(Ws, As, Bs, scalings, groups, given[0]),
        group_count(given[0], groups),
        need[0],
        need[2::4],
        need[3::4],
        [b.dtype if wanted and b is not None else None for b, wanted in zip(biases, need[4::4], strict=True)],
    )
    out: list[Weight] = [None if found.x is None else found.x.view(*lead, found.x.shape[1])]
    for each in zip(found.A, found.B, found.bias, strict=True):
        out += [None, *[like_groups(g, lead[:groups]) for g in each]]
    return out


def _all_given(grads: Sequence[Weight], Ws: Sequence[Any]) -> list[torch.Tensor]:
    """Zeros for an output that reached no loss."""
    some = next(g for g in grads if g is not None)
    return [some.new_zeros(*some.shape[:-1], w.shape[-2]) if g is None else g for g, w in zip(grads, Ws, strict=True)]


def projection_pair(name: str, count: int) -> Any:
    """The Functions of `count` projections: pair(x, W, A, B, bias, ..., groups, scalings) -> (*outputs, trace, Z)."""
    kinds = [[1 + 4 * j + kind for j in range(count)] for kind in range(4)]
    return function_pair(
        name,
        forward=_forward,
        backward=_backward,
        roles=(ROWS, *[SHARED] * 4 * count),
        save_inputs=(0, *kinds[0], *kinds[1], *kinds[2], *kinds[3]),
        save_outputs=(count, count + 1),
        outputs=count + 1,
        stats=1,
        # x is there for dA alone
        save_for={0: kinds[1]},
    )


_lora_w = projection_pair("opake_lora_w", 1)


def opake_lora_w(
    X: torch.Tensor,
    W: torch.Tensor,
    A: Weight,
    B: Weight,
    scaling: float,
    bias: Weight = None,
    *,
    lora_precision: str = "compute",
) -> torch.Tensor:
    """X W^T + (X A) B * scaling + bias.

    X: (..., hidden), floating, any strides; W: (out, hidden) in the dtype of X (any under autocast); A: (hidden, rank);
    B: (rank, out), any floating dtype; bias: (out,) or None. A, B (and bias) may have a leading example axis, best
    as an expanded view: (B, hidden, rank) beside X (B, ..., hidden); their gradients are then per example in plain
    autograd.
    A and B None: the base projection alone. Returns (..., out) in the dtype of X.

    Adapters are cast to the dtype of X once a call; gradients come back in the dtype of the parameter, accumulated in
    fp32. `lora_precision="param"` computes the low-rank branch in the dtype of A, as PEFT does, in plain torch; so is a
    call whose W needs a gradient. Raises TypeError (dtype) and ValueError (shape, device, unknown precision).
    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).
    """
    op = "opake_lora_w"
    given = [("", W, A, B, bias)]
    check_precision(op, lora_precision)
    X = check_projections(op, X, given)
    if takes_twin(given, lora_precision):
        return lora_w_reference(X, W, A, B, scaling, bias, lora_precision=lora_precision)
    groups = leading_axis(given)
    return _lora_w(X, *with_axis(groups, given[0]), groups, (float(scaling),))[0]
