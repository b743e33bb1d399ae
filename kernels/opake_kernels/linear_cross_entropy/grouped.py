"""One pass of a back end over tensors with group dimensions: folded to one call where groups do not matter.

They matter where a group has a weight of its own, and where a gradient is summed over the tokens of a group: then the
groups take turns, and each sum is rounded into its place before the next begins. So gradients of the weight for B
examples take B x V x H elements and one fp32 accumulator, and nothing else of that size.
"""

from __future__ import annotations

import torch

from opake_kernels.fold import fold_groups, fold_rows, fold_shared

from .chunked import chunked_pass
from .fused import fused_pass
from .passes import Gradients, Head, Need, Plan, accumulator_dtype

__all__ = ["by_tokens", "run"]


def by_tokens(t: torch.Tensor, groups: int) -> torch.Tensor:
    """(*groups, ...) -> (*groups, R)."""
    return t.flatten(groups) if t.dim() > groups else t.unsqueeze(-1)


def run(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    groups: int,
    plan: Plan,
    need: Need,
    scale: torch.Tensor | None = None,
) -> Gradients:
    """Losses and the gradients that `need` names, in the shapes of the arguments.

    hidden (*groups, ..., H), labels and scale (*groups, ...), weight (*groups or ones, V, H), bias alike. The gradients
    of weight and bias have all groups full: of one group in fp32, of more in the dtype of the weight.
    """
    G, lead = fold_groups(hidden, groups), hidden.shape[:groups]
    x = fold_rows(hidden, groups)
    rows = [None if t is None else t.reshape(x.shape[:2]).contiguous() for t in (labels, scale)]
    w, b = _folded(weight, groups, hidden), None if bias is None else _folded(bias, groups, hidden)
    shared = len(w) == 1 and (b is None or len(b) == 1)
    summed = need.weight or need.bias
    if G == 1 or (shared and not summed):
        flat = [None if t is None else t.flatten(0, 1) for t in rows]
        found = _pass(x.flatten(0, 1), w[0], None if b is None else b[0], flat, plan, need)
    else:
        found = _in_turn(x, w, b, rows, plan, need)
    return Gradients(
        found.loss.reshape(labels.shape),
        None if found.hidden is None else found.hidden.reshape(hidden.shape),
        None if found.weight is None else found.weight.reshape(*lead, *weight.shape[groups:]),
        None if found.bias is None else found.bias.reshape(*lead, weight.shape[-2]),
    )


def _folded(w: torch.Tensor, groups: int, like: torch.Tensor) -> torch.Tensor:
    """(1 | G, ...); also (1, ...) where the groups are only expanded."""
    w = fold_shared(w, groups, like)
    return w[:1] if len(w) and w.stride(0) == 0 else w


def _pass(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, rows: list, plan: Plan, need: Need) -> Gradients:
    labels, scale = rows
    head = Head(x, w, b, labels, plan.loss, scale)
    return chunked_pass(head, need, plan.width) if plan.width else fused_pass(head, need)


def _in_turn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, rows: list, plan: Plan, need: Need) -> Gradients:
    (G, R, H), V = x.shape, w.shape[1]
    wide = accumulator_dtype(x.dtype)
    loss = x.new_zeros(G, R, dtype=wide)
    sizes = ((G, R, H), (G, V, H), (G, V))
    gradients = [x.new_empty(size) if wanted else None for size, wanted in zip(sizes, need, strict=True)]
    for g in range(G):
        mine = [None if t is None else t[g] for t in rows]
        found = _pass(x[g], w[g % len(w)], None if b is None else b[g % len(b)], mine, plan, need)
        loss[g] = found.loss
        for place, gradient in zip(gradients, found[1:], strict=True):
            if place is not None and gradient is not None:
                place[g] = gradient
    return Gradients(loss, *gradients)
