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
    total = num_items_in_batch is not None and not inside_transform()
    loss = opake_cross_entropy_loss(
        logits,
        shift_labels.to(logits.device),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="sum" if total else "mean",
    )
    if not total:
        return loss
    count = num_items_in_batch
    return loss / (count.to(loss.device) if isinstance(count, torch.Tensor) else count)
