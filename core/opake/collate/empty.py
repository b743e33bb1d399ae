"""What a collator returns for no rows at all, which Poisson sampling draws now and then.

Names follow the collator's tokenizer; sizes are zero. No row that was seen before is kept to copy its form from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

TOKENS = ("input_ids", "attention_mask")


def tolerant_call(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A collator's `__call__` that answers an empty list with tensors of no rows and leaves all else to `stock`."""

    @functools.wraps(stock)
    def call(self: Any, features: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(features, list | tuple) and not features:
            return empty_batch(self)
        return stock(self, features, *args, **kwargs)

    return call


def tolerant_function(stock: Callable[..., Any]) -> Callable[..., Any]:
    """As `tolerant_call`, for a collator that is a plain function."""

    @functools.wraps(stock)
    def call(features: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(features, list | tuple) and not features:
            return empty_batch(None)
        return stock(features, *args, **kwargs)

    return call


def empty_batch(collator: Any) -> dict[str, torch.Tensor]:
    """{name: int64 tensor of shape (0, 0)} for every name that the collator's batches are known to have."""
    from transformers import BatchEncoding

    tokenizer = getattr(collator, "tokenizer", None)
    names: list[str] = list(getattr(tokenizer, "model_input_names", TOKENS))
    if type(collator).__name__ != "DataCollatorWithPadding":
        names.append("labels")
    batch = {name: torch.zeros(0, 0, dtype=torch.long) for name in names}
    return batch if tokenizer is None else BatchEncoding(batch)  # type: ignore[return-value]
