"""Every LoRA projection of a model through `opake_lora_w`: attention outputs, combined projections, heads, all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from opake.patching.instance import untouched, wrap_method
from opake.patching.notes import note
from opake.patching.undo import Skip, Undo
from opake_kernels.lora import opake_lora_w

from .layers import is_lora, is_parameter, is_projection, parameters_of, read


def sites(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every LoRA layer but those of bare parameters; `fits` says which of them are projections."""
    for name, module in model.named_modules():
        if (is_lora(module) or is_projection(module)) and not is_parameter(module):
            yield name, module


def fits(module: nn.Module) -> Skip | None:
    if not is_projection(module):
        return Skip(f"lora.{type(module).__name__} keeps PEFT's forward", "stock")
    return None if untouched(module, "forward") else Skip("its forward was replaced by somebody else")


def apply(module: nn.Module) -> Undo:
    return Undo([wrap_method(module, "forward", _forward)])


def axis_parameters(module: nn.Module) -> frozenset[str]:
    return parameters_of(read(module)) & frozenset(name for name, _ in module.named_parameters())


def _forward(inner: Callable[..., Any], self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return inner(self, x, *args, **kwargs)
    found = "it is called with more than an input" if args or kwargs else read(self, x)
    if isinstance(found, str):
        note(self, found)
    elif found.adapter is not None:
        return opake_lora_w(x, found.W, found.A, found.B, found.scaling, found.bias)
    return inner(self, x, *args, **kwargs)
