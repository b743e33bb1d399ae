"""Token losses that are not the shifted causal one, inside transforms: masked language models, and losses written out.

The mean over labels that are not ignored has no value in a row without any, and the gradient of such a row is not a
number. Here it is 0, as for causal models (see `loss`). Outside transforms nothing changes, and losses of other kinds
(regression, weights, smoothing) run as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from opake import hf
from opake.patching.replace import globals_read, overlay
from opake.patching.undo import Skip, Undo, put
from opake.transforms import inside_transform

from .loss import row_mean


class RowCrossEntropy(nn.CrossEntropyLoss):
    """`CrossEntropyLoss` whose mean over no label at all is 0, inside transforms."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        plain = self.weight is None and self.label_smoothing == 0 and self.reduction == "mean"
        if not inside_transform() or not plain or input.dim() != 2 or target.is_floating_point():
            return super().forward(input, target)
        return row_mean(input, target, self.ignore_index)


def fits(model: nn.Module) -> Skip | None:
    if _is_masked(model) or globals_read(model, _is_stock):
        return None
    return Skip("the model has no such loss", "stock")


def apply(model: nn.Module) -> Undo:
    changes = [put(model, "_loss_function", masked_row_loss)] if _is_masked(model) else []
    names = dict.fromkeys(globals_read(model, _is_stock), RowCrossEntropy)
    return Undo(changes + (overlay(model, names).changes if names else []))


def masked_row_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    **kwargs: Any,
) -> torch.Tensor:
    """Mean cross-entropy over labels that are not ignored, fp32; logits (..., T, V), labels (..., T), not shifted."""
    if not inside_transform():
        return hf.masked_loss()(logits, labels, vocab_size, num_items_in_batch, ignore_index, **kwargs)
    return row_mean(logits, labels, ignore_index)


def _is_masked(model: nn.Module) -> bool:
    return getattr(model, "loss_function", None) is hf.masked_loss()


def _is_stock(value: Any) -> bool:
    return value is nn.CrossEntropyLoss
