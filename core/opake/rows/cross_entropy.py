"""`CrossEntropy` in place: the fused loss over logits, through the model's public `loss_function`.

Inside transforms the loss is the row's own mean; outside, `num_items_in_batch` and `shift_labels` are honoured as
Transformers does. `label_smoothing` may be given as a keyword of the model call. Logits are left intact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from opake import hf
from opake.batching.loss import row_loss
from opake.patching.undo import Skip, Undo, put
from opake.transforms import inside_transform
from opake_kernels.cross_entropy import opake_cross_entropy_loss

if TYPE_CHECKING:
    from opake.records import CrossEntropy


def fits(record: CrossEntropy, model: nn.Module) -> Skip | None:
    current = getattr(model, "loss_function", None)
    if current in (hf.causal_loss(), row_loss):
        return None
    return Skip(f"the loss of {type(model).__name__} is {getattr(current, '__name__', current)!s}, not the causal one")


def apply(record: CrossEntropy, model: nn.Module) -> Undo:
    return Undo([put(model, "_loss_function", causal_loss)])


def causal_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    **kwargs: Any,
) -> torch.Tensor:
    """Cross-entropy of the next token, fp32; 0 where every label is ignored.

    logits: (..., T, V); labels: (..., T), shifted here; shift_labels: (..., T), already shifted.
    """
    if shift_labels is None:
        assert labels is not None, "the model calls its loss only with labels"
        # labels move, not logits: a shifted view of (B, T, V) would have to be copied
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    count = None if inside_transform() else num_items_in_batch
    loss = opake_cross_entropy_loss(
        logits,
        shift_labels.to(logits.device),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="mean" if count is None else "sum",
    )
    if count is None:
        return loss
    return loss / (count.to(loss.device) if isinstance(count, torch.Tensor) else count)


def row_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of each row of a batch: logits (B, T, V), labels (B, T), shifted here -> (B,), fp32."""
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].to(logits.device)
    tokens = opake_cross_entropy_loss(logits, shifted, reduction="none")
    return tokens.sum(-1) / (shifted != -100).sum(-1).clamp(min=1)


# the batched engine asks the loss function for its per-row form
causal_loss.row_losses = row_losses  # type: ignore[attr-defined]
