"""The causal loss of one row, inside transforms: normalised by that row's own labels and by nothing else.

Outside transforms the stock loss runs, `num_items_in_batch` and all; `label_smoothing`, which stock would pass over in
silence, is honoured in both. Inside, a count taken over the batch would let a row's gradient depend on its neighbours'
labels, so it is not used, and the model notes that it was given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from opake import hf
from opake.patching.undo import Skip, Undo, put
from opake.transforms import inside_transform


def fits(model: nn.Module) -> Skip | None:
    current = getattr(model, "loss_function", None)
    if current is hf.causal_loss():
        return None
    if current is None:
        return Skip(f"{type(model).__name__} computes its loss itself")
    return Skip(f"the loss is {getattr(current, '__name__', current)!s}, not the causal one; it runs as it is", "stock")


def apply(model: nn.Module) -> Undo:
    return Undo([put(model, "_loss_function", row_loss)])


def row_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    **kwargs: Any,
) -> torch.Tensor:
    """Mean cross-entropy of the next token, fp32; 0, with zero gradients, where every label is ignored.

    logits: (..., T, V); labels: (..., T), shifted here; shift_labels: (..., T), already shifted.
    """
    inside = inside_transform()
    if not inside and not label_smoothing:
        stock: Callable[..., torch.Tensor] = hf.causal_loss()
        return stock(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
    if shift_labels is None:
        assert labels is not None, "the model calls its loss only with labels"
        logits, shift_labels = logits[..., :-1, :], labels[..., 1:]
    return row_mean(logits, shift_labels, ignore_index, label_smoothing, None if inside else num_items_in_batch)


def row_mean(
    logits: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    count: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Token losses over `count`, else over the number of labels not ignored; logits (..., T, V), labels (..., T)."""
    flat = labels.reshape(-1).to(logits.device)
    rows = logits.reshape(-1, logits.shape[-1]).float()
    total = F.cross_entropy(rows, flat, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing)
    if count is None:
        count = (flat != ignore_index).sum().clamp(min=1)
    return total / (count.to(total.device) if isinstance(count, torch.Tensor) else count)
