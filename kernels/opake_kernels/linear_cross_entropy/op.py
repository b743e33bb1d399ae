"""The public function, its twin, and the two ways in which autograd sees it.

Where backward only has to scale what forward can compute - the gradient of the hidden states always, that of weight and
bias for a reduced loss - forward computes it together with the loss: no logit is computed twice. Left for backward, at
the price of computing the logits and their softmax again, are the gradients of weight and bias when each token has an
incoming gradient of its own, and for each example: they would be held from forward to backward. Which gradients may be
asked for is read from the arguments, at every transform level. The work is done by fused.py and chunked.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from opake_kernels.checks import (
    autocast_to_compute_dtype,
    check_float,
    check_index,
    check_same_device,
    check_same_dtype,
    check_shape,
)
from opake_kernels.cross_entropy import CrossEntropySettings, cross_entropy_reference
from opake_kernels.fold import ROWS, SHARED, function_pair, transforms_active
from opake_kernels.labels import look_at_labels
from opake_kernels.launch import uses_triton
from opake_kernels.tracked import tracked

from .chunked import AUTOMATIC
from .grouped import by_tokens, run
from .passes import Gradients, Need, Plan, accumulator_dtype

__all__ = ["linear_cross_entropy_reference", "opake_linear_cross_entropy_loss"]

_OP = "opake_linear_cross_entropy_loss"


def linear_cross_entropy_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    settings: CrossEntropySettings | None = None,
) -> torch.Tensor:
    """The plain twin of `opake_linear_cross_entropy_loss`: all logits at once."""
    return cross_entropy_reference(functional.linear(hidden, weight, bias), labels, settings)


def _reduced(losses: torch.Tensor, labels: torch.Tensor, groups: int, loss: CrossEntropySettings) -> Any:
    """(loss, the factor of every token in it for each group); the sum is rounded once."""
    each = by_tokens(losses, groups)
    factor = losses.new_ones(losses.shape[:groups])
    if loss.reduction == "none":
        return losses, factor
    total = each.sum(-1, dtype=losses.dtype if losses.device.type == "mps" else torch.float64)
    if loss.reduction == "mean":
        count = (by_tokens(labels, groups) != loss.ignore_index).sum(-1).clamp(min=1)
        total, factor = total / count, factor / count
    return total.to(losses.dtype), factor


def _kept(gradient: torch.Tensor | None, like: torch.Tensor, groups: int) -> torch.Tensor:
    # every output must have the groups, also one that stands for nothing
    return like.new_empty(*like.shape[:groups], 0) if gradient is None else gradient


def _over_tokens(factor: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return factor.reshape(*factor.shape, *[1] * (labels.dim() - factor.dim())).expand(labels.shape)


def _scaled(gradient: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """gradient * scale, rounded once; `scale` has the leading dimensions of `gradient`."""
    scale = scale.reshape(*scale.shape, *[1] * (gradient.dim() - scale.dim()))
    out = torch.empty(gradient.shape, dtype=dtype, device=gradient.device)
    return torch.mul(gradient, scale, out=out)


def _forward_eager(hidden: Any, weight: Any, bias: Any, labels: Any, _anchor: Any, groups: int, plan: Plan) -> Any:
    found = run(hidden, weight, bias, labels, groups, plan, plan.eager)
    gradients = [_kept(d, hidden, groups) for d in found[1:]]
    return *_reduced(found.loss, labels, groups, plan.loss), *gradients


def _backward_eager(grads: Any, saved: Any, need: Any, groups: int, plan: Plan) -> Any:
    (g,), (_weight, _bias, anchor, factor, dx, dw, db) = grads, saved
    missing = [name for name, asked, had in zip(Need._fields, need, plan.eager, strict=False) if asked and not had]
    if missing:
        raise RuntimeError(f"{_OP}: the gradient of {missing[0]} was asked for, but nothing said so in forward")
    scale = g if plan.loss.reduction == "none" else g * factor
    scaled = [_scaled(d, scale, dx.dtype) if n else None for d, n in zip((dx, dw, db), need, strict=False)]
    return [*scaled, None, torch.empty_like(anchor) if need[4] else None]


def _forward_lazy(hidden: Any, weight: Any, bias: Any, labels: Any, groups: int, plan: Plan) -> Any:
    found = run(hidden, weight, bias, labels, groups, plan, Need(plan.eager.hidden))
    return *_reduced(found.loss, labels, groups, plan.loss), _kept(found.hidden, hidden, groups)


def _backward_lazy(grads: Any, saved: Any, need: Any, groups: int, plan: Plan) -> Any:
    (g,), (hidden, weight, bias, labels, factor, dx) = grads, saved
    scale = g if plan.loss.reduction == "none" else _over_tokens(g * factor, labels)
    ready = plan.eager.hidden
    asked = Need(need[0] and not ready, need[1], need[2])
    found = run(hidden, weight, bias, labels, groups, plan, asked, scale) if any(asked) else Gradients(factor)
    dx = _scaled(dx, scale, hidden.dtype) if ready and need[0] else found.hidden
    return [dx, *[None if d is None else d.to(hidden.dtype) for d in found[2:]], None]


def _outline_eager(hidden: Any, weight: Any, bias: Any, labels: Any, _anchor: Any, groups: int, plan: Plan) -> Any:
    wide, lead = accumulator_dtype(hidden.dtype), hidden.shape[:groups]
    sizes = (hidden.shape, weight.shape, weight.shape[:-1])
    dtypes = (hidden.dtype, wide, wide) if groups == 0 else (hidden.dtype,) * 3
    kept = [(*lead, 0) if not asked else size for size, asked in zip(sizes, plan.eager, strict=True)]
    kept_dtypes = [hidden.dtype if not asked else d for d, asked in zip(dtypes, plan.eager, strict=True)]
    loss = labels.shape if plan.loss.reduction == "none" else lead
    return [(loss, wide), (lead, wide), *zip(kept, kept_dtypes, strict=True)]


def _outline_lazy(hidden: Any, weight: Any, bias: Any, labels: Any, groups: int, plan: Plan) -> Any:
    frozen = Plan(plan.loss, plan.width, Need(plan.eager.hidden))
    return _outline_eager(hidden, weight, bias, labels, None, groups, frozen)[:3]


_ROLES = (ROWS, SHARED, SHARED, ROWS)
# stored gradients know nothing of what they came from: saving weight, bias and an anchor in the graph of the hidden
# states, which holds no data, lets a double backward be noticed, and refused
_eager_loss = function_pair(
    _OP,
    forward=_forward_eager,
    backward=_backward_eager,
    roles=(*_ROLES, ROWS),
    save_inputs=(1, 2, 4),
    save_outputs=(1, 2, 3, 4),
    stats=4,
    outline=_outline_eager,
)
_lazy_loss = function_pair(
    f"{_OP}_lazy",
    forward=_forward_lazy,
    backward=_backward_lazy,
    roles=_ROLES,
    save_inputs=(0, 1, 2, 3),
    save_outputs=(1, 2),
    stats=2,
    outline=_outline_lazy,
)


def opake_linear_cross_entropy_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_softcapping: float | None = 0.0,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    chunk: int | bool | None = None,
) -> torch.Tensor:
    """Cross-entropy of softmax(softcap(logit_scale * (hidden @ weight.T + bias))) without ever holding the logits.

    hidden: (..., H) floating; weight: (V, H), bias: (V) or None, of the same dtype; labels: (...) int64 or int32. The
    remaining keywords mean what they do in `opake_cross_entropy_loss`, and so does the fp32 result: reduction "none"
    has the shape of `labels`, "mean" is over labels that are not ignored and 0 when all are. With a weight (B, V, H) of
    its own for each example, hidden is (B, ..., H), bias (B, V), and "sum" and "mean" are (B,).

    chunk: None takes the fused back end on CUDA (whole rows of logits for as many tokens as 256 MiB hold, or 512 MiB
    where a gradient of the weight is summed) and the chunked one elsewhere; True or a number of vocabulary columns, the
    widest tile, forces the chunked one. Gradients are summed in fp32. A frozen head costs two matrix products, forward
    and backward together, and a trainable one three (four in tiles of a given width); under vmap a gradient of the
    weight is (V, H) for each example, at four (five).

    Raises TypeError (dtype), ValueError (shape, device, settings). A label out of range is a ValueError where looking
    costs no device read, else the loss of its token is NaN. Double backward and forward mode raise RuntimeError.
    """
    loss = CrossEntropySettings.checked(_OP, ignore_index, label_smoothing, logit_softcapping, logit_scale, reduction)
    width = _width(chunk)
    check_float(_OP, hidden=hidden, weight=weight, **({} if bias is None else {"bias": bias}))
    check_index(_OP, labels=labels)
    hidden, weight, *rest = autocast_to_compute_dtype(hidden, weight, *([] if bias is None else [bias]))
    bias = rest[0] if rest else None
    groups = _check_shapes(hidden, weight, bias, labels)
    look_at_labels(_OP, labels, weight.shape[-2], ignore_index)
    if not uses_triton(hidden, weight, labels, bias):
        width = width or AUTOMATIC
    eager = Need(tracked(hidden), tracked(weight), tracked(bias))
    plan = Plan(loss, width, eager)
    ahead = reduction != "none" and not groups and not transforms_active()
    if ahead or not (eager.weight or eager.bias):
        anchor = hidden[..., :0].clone() if eager.hidden else None
        return _eager_loss(hidden, weight, bias, labels, anchor, groups, plan)[0]
    return _lazy_loss(hidden, weight, bias, labels, groups, plan)[0]


def _width(chunk: int | bool | None) -> int:
    """The widest vocabulary tile that `chunk` asks for; 0 leaves the choice of the back end to the device."""
    if chunk is None or chunk is False:
        return 0
    if chunk is True:
        return AUTOMATIC
    if not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"{_OP}: chunk is {chunk!r}, expected None, True or a positive number of vocabulary columns")
    return chunk


def _check_shapes(hidden: Any, weight: Any, bias: Any, labels: Any) -> int:
    """Everything that can be wrong with shapes, dtypes and devices; returns the number of group dimensions."""
    named = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
    check_same_dtype(_OP, **named)
    check_same_device(_OP, **named, labels=labels)
    if weight.dim() not in (2, 3) or 0 in weight.shape[-2:]:
        shape = tuple(weight.shape)
        why = "; is it a shard that was not gathered?" if 0 in shape else ""
        raise ValueError(f"{_OP}: weight has shape {shape}, expected (V, H) or (B, V, H) with V, H >= 1{why}")
    groups = weight.dim() - 2
    if hidden.dim() < 1 + groups or hidden.shape[-1] != weight.shape[-1]:
        expected = "(B, ..., H)" if groups else "(..., H)"
        raise ValueError(
            f"{_OP}: hidden has shape {tuple(hidden.shape)}, expected {expected} with H = {weight.shape[-1]} as in "
            f"weight {tuple(weight.shape)}"
        )
    if groups:
        check_shape(_OP, "weight", weight.shape[:1], hidden.shape[:1], "the examples of hidden")
    if bias is not None:
        check_shape(_OP, "bias", bias.shape, weight.shape[:-1], "the rows of weight")
    check_shape(_OP, "labels", labels.shape, hidden.shape[:-1], "the leading dimensions of hidden")
    return groups
