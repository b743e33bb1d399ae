"""Refuse inputs that a model would answer with a wrong number or an unreadable error. Shapes and dtypes only.

With `logits_to_keep` a model has logits for some of the tokens, and takes labels for those. How many they are follows
from its shape, except for a mask: there torch compares labels with logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from opake import hf
from opake.errors import InputError, OptionTypeError

# how many dimensions an argument may have in a batched call: a mask may be ready-made, positions may be of three kinds
DIMENSIONS = {"attention_mask": (2, 4), "position_ids": (2, 3), "labels": (2,)}
KEEP = "logits_to_keep"
MASKS = (torch.bool, torch.uint8)
TOKENS = (torch.int64, torch.int32)


def check_rows(model: Any, kwargs: Mapping[str, Any]) -> None:
    """Check the row tensors of one (batched) call of `model` against its ids or embeddings.

    Labels are looked at where the model's loss is about tokens; labels of whole rows are the model's own business.

    Raises:
        InputError: empty sequences, or a mask, labels or position_ids of another batch, length or number of dimensions.
        OptionTypeError: floating-point ids or token labels.
    """
    where = type(model).__name__
    ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
    main, name = (ids, "input_ids") if isinstance(ids, torch.Tensor) else (embeds, "inputs_embeds")
    if not isinstance(main, torch.Tensor):
        return
    if name == "input_ids" and main.is_floating_point():
        raise OptionTypeError(f"{where}: input_ids are {main.dtype}; token ids are integers (torch.long)")
    # several sequences a row, as in multiple choice, have a shape of their own
    if main.dim() != (2 if name == "input_ids" else 3):
        return
    if main.shape[1] == 0:
        raise InputError(f"{where}: {name} has shape {tuple(main.shape)}: a sequence needs at least one token")
    given = f"{name} has shape {tuple(main.shape)}"
    for other in ("attention_mask", "position_ids"):
        if isinstance(value := kwargs.get(other), torch.Tensor):
            _check_like(where, given, main.shape, other, value, cached=_cached(kwargs))
    if isinstance(kwargs.get("labels"), torch.Tensor) and hf.labels_are_tokens(model):
        _check_labels(model, given, main.shape, kwargs)


def _cached(kwargs: Mapping[str, Any]) -> bool:
    return any(kwargs.get(key) is not None for key in hf.CACHE_KEYWORDS)


def _check_labels(model: Any, given: str, shape: torch.Size, kwargs: Mapping[str, Any]) -> None:
    where, labels, keep = type(model).__name__, kwargs["labels"], kwargs.get(KEEP)
    if labels.dtype not in TOKENS:
        raise OptionTypeError(
            f"{where}: labels are {labels.dtype}; token labels are integers (torch.long, -100 = ignored)"
        )
    if KEEP in kwargs:
        size = f"has shape {tuple(keep.shape)}" if isinstance(keep, torch.Tensor) else f"is {keep}"
        given = f"{given} and {KEEP} {size}"
    tokens = _kept(keep, shape[1]) if keep is None or hf.accepts(type(model).forward, KEEP) else None
    # labels that are shifted already stand in for these
    if tokens is not None and kwargs.get("shift_labels") is None:
        _check_like(where, given, torch.Size((shape[0], tokens)), "labels", labels)


def _kept(keep: Any, tokens: int) -> int | None:
    """For how many of so many tokens a model has logits; None if shapes do not say."""
    if keep is None:
        return tokens
    if isinstance(keep, int):
        return len(range(tokens)[-keep:])
    # positions, the same for all rows or those of each
    if isinstance(keep, torch.Tensor) and keep.dim() and keep.dtype not in MASKS:
        return keep.shape[-1]
    return None


def _check_like(
    where: str, given: str, shape: torch.Size, other: str, value: torch.Tensor, cached: bool = False
) -> None:
    """Refuse a `value` that is not for the rows and tokens of `shape`; `given` says where that comes from."""
    B, T = shape[:2]
    if value.dim() not in DIMENSIONS[other]:
        expected = " or ".join(map(str, DIMENSIONS[other]))
        raise InputError(
            f"{where}: {other} has shape {tuple(value.shape)} but {given} (batch first, "
            f"added here if a row came without one); {other} takes {expected} dimensions, here ({B}, {T})"
        )
    if value.dim() == 2:
        lengths_differ = value.shape[1] != T and not (other == "attention_mask" and cached)
        rows_differ = value.shape[0] not in ((1, B) if other == "position_ids" else (B,))
        if lengths_differ or rows_differ:
            raise InputError(
                f"{where}: {other} has shape {tuple(value.shape)} but {given}; "
                f"expected the same rows and tokens, here ({B}, {T})"
            )
