"""Experts chosen as `eager` inside transforms: stock asks which experts were hit, so the grouped products run instead.

The numbers are those of the same experts; outside transforms the model's own choice runs. Fused experts are not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from opake import hf
from opake.patching.instance import wrap_method
from opake.patching.undo import Skip, Undo
from opake.transforms import inside_transform

# what Transformers' decorator sets on experts that it dispatches
MARKS = ("has_gate", "has_bias", "is_transposed", "_apply_gate")


def sites(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if all(hasattr(module, mark) for mark in MARKS):
            yield name, module


def fits(module: nn.Module) -> Skip | None:
    chosen = hf.experts_name(module)
    return None if chosen == "eager" else Skip(f"experts implementation {chosen!r} runs under vmap as it is", "stock")


def apply(module: nn.Module) -> Undo:
    return Undo([wrap_method(module, "forward", _forward)])


def _forward(inner: Callable[..., Any], self: nn.Module, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if not inside_transform() or hf.experts_name(self) != "eager":
        return inner(self, hidden, *args, **kwargs)
    return products(hidden)(self, hidden, *args, *kwargs.values())


def products(hidden: torch.Tensor) -> Callable[..., Any]:
    """Transformers' function that computes any experts without asking which were hit."""
    # grouped products know no float64
    return _batched if hidden.dtype == torch.float64 else hf.experts_functions()["grouped_mm"]


def _batched(self: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    # before Transformers 5.10 it writes into the indices, which the router's backward still needs
    return hf.experts_functions()["batched_mm"](self, hidden, index.clone(), weights)
