"""Routers that scatter into a tensor in place, for which torch has no batching rule: it would loop over rows.

Inside transforms the forward of such a module runs with that one operation done out of place, which has a rule, and
copied; the numbers are the same. Other operations are not touched. Grouped routers (DeepSeek-V3, GLM-4), that of
Llama 4 and compressors (DeepSeek-V4) do so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from opake.patching.instance import layers, mentioned_names, unbound, wrap_method
from opake.patching.replace import methods
from opake.patching.undo import Undo
from opake.transforms import inside_transform

NAME = "scatter_"


def sites(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if _scatters(module):
            yield name, module


def apply(module: nn.Module) -> Undo:
    return Undo([wrap_method(module, "forward", _forward)])


class OutOfPlace(TorchFunctionMode):
    """`tensor.scatter_(dim, index, numbers)` as `scatter` and a copy."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.scatter_ and "reduce" not in kwargs:
            return args[0].copy_(torch.scatter(*args, **kwargs))
        return func(*args, **kwargs)


def _forward(inner: Callable[..., Any], self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not inside_transform():
        return inner(self, *args, **kwargs)
    with OutOfPlace():
        return inner(self, *args, **kwargs)


def _scatters(module: nn.Module) -> bool:
    """Whether the module's own code does it, in its forward or a method that it calls."""
    if not type(module).__module__.startswith("transformers."):
        return False
    code = (layer.__code__ for method in methods(module) for layer in layers(unbound(module, method)))
    return any(NAME in mentioned_names(each) for each in code)
