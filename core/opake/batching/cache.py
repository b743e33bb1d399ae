"""No KV cache in a training forward that did not ask for one: it would be filled, never read, and kept for backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from opake import hf
from opake.patching.instance import unbound, wrap_method
from opake.patching.undo import Skip, Undo


def fits(model: nn.Module) -> Skip | None:
    if hf.takes_use_cache(model, unbound(model, "forward")):
        return None
    return Skip(f"{type(model).__name__}.forward has no use_cache")


def apply(model: nn.Module) -> Undo:
    return Undo([wrap_method(model, "forward", _forward)])


def _forward(inner: Callable[..., Any], self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if self.training and torch.is_grad_enabled() and _unasked(inner, args, kwargs):
        kwargs["use_cache"] = False
    return inner(self, *args, **kwargs)


def _unasked(inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    place = hf.position_of(inner, "use_cache")
    asked = kwargs.get("use_cache") is not None or (place is not None and len(args) > place)
    # without a cache Transformers looks for sequences packed in one row, so there the cache decides the numbers
    packed = kwargs.get("position_ids") is not None and kwargs.get("attention_mask") is None
    return not asked and not packed and all(kwargs.get(name) is None for name in hf.CACHE_KEYWORDS)
