"""Refuse inputs that a model would answer with a wrong number or an unreadable error. Shapes and dtypes only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from opake import hf
from opake.errors import InputError, OptionTypeError


def check_rows(model: str, kwargs: Mapping[str, Any]) -> None:
    """Check the row tensors of one (batched) call against its ids or embeddings.

    Raises:
        InputError: empty sequences, or a mask, labels or position_ids of another batch or length.
        OptionTypeError: floating-point ids or labels of a causal model's length.
    """
    ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
    main, name = (ids, "input_ids") if isinstance(ids, torch.Tensor) else (embeds, "inputs_embeds")
    if not isinstance(main, torch.Tensor):
        return
    if name == "input_ids" and main.is_floating_point():
        raise OptionTypeError(f"{model}: input_ids are {main.dtype}; token ids are integers (torch.long)")
    if main.dim() < 2:
        return
    if main.shape[1] == 0:
        raise InputError(f"{model}: {name} has shape {tuple(main.shape)}: a sequence needs at least one token")
    cached = any(kwargs.get(key) is not None for key in hf.CACHE_KEYWORDS)
    for other in ("attention_mask", "labels", "position_ids"):
        _check_like(model, name, main, other, kwargs.get(other), cached)


def _check_like(model: str, name: str, main: torch.Tensor, other: str, value: Any, cached: bool) -> None:
    if not isinstance(value, torch.Tensor) or value.dim() != 2:
        return
    B, T = main.shape[:2]
    lengths_differ = value.shape[1] != T and not (other == "attention_mask" and cached)
    rows_differ = value.shape[0] not in ((1, B) if other == "position_ids" else (B,))
    if lengths_differ or rows_differ:
        raise InputError(
            f"{model}: {other} has shape {tuple(value.shape)} but {name} has shape {tuple(main.shape)}; "
            f"both need the same rows and tokens, here ({B}, {T})"
        )
    if other == "labels" and value.is_floating_point():
        raise OptionTypeError(
            f"{model}: labels are {value.dtype}; token labels are integers (torch.long, -100 = ignored)"
        )
