"""Cross-entropies of deferred logits, computed from their hidden states; NotImplemented asks for the logits instead."""

# ruff: noqa: TID253
from __future__ import annotations

import math
from typing import Any

import torch

from opake.transforms import inside_transform
from opake_kernels.linear_cross_entropy import opake_linear_cross_entropy_loss

from .served import handler


@handler
def cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`F.cross_entropy` of deferred logits; NotImplemented for what the fused loss does not know."""
    plain = isinstance(target, torch.Tensor) and input.ndim <= 2
    if not plain or weight is not None or size_average is not None or reduce is not None:
        return NotImplemented
    loss = _fused(input, target, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
    if loss is NotImplemented or reduction != "mean" or input.head.by_row or inside_transform():
        return loss
    # the fused mean over no label is 0, and so is the loss of a row; torch's own is not a number
    return loss.masked_fill((target == ignore_index).all(), math.nan)


@handler
def opake_cross_entropy(logits: Any, labels: Any, **options: Any) -> Any:
    """`opake_cross_entropy_loss` of deferred logits; NotImplemented where it scales or caps them once more."""
    scaled = options.pop("logit_scale", 1.0) != 1.0 or options.pop("logit_softcapping", 0.0)
    return NotImplemented if scaled else _fused(logits, labels, **options)


def _fused(logits: Any, labels: torch.Tensor, **options: Any) -> Any:
    head, hidden = logits.head, logits.hidden
    if labels.is_floating_point() or labels.shape != hidden.shape[:-1]:
        return NotImplemented
    settings = {**options, **logits.scaling.options(), "bias": head.bias, "chunk": head.chunk}
    if head.weight.dim() == 2:
        return opake_linear_cross_entropy_loss(hidden, head.weight, labels, **settings)
    # a weight for each example: tokens are in the order of the examples, however they are shaped
    B, H = head.weight.shape[0], hidden.shape[-1]
    reduction = settings.pop("reduction", "mean")
    tokens = opake_linear_cross_entropy_loss(
        hidden.reshape(B, -1, H), head.weight, labels.reshape(B, -1), reduction="none", **settings
    ).reshape(labels.shape)
    if reduction == "none":
        return tokens
    count = (labels != options.get("ignore_index", -100)).sum().clamp(min=1) if reduction == "mean" else 1
    return tokens.sum() / count
