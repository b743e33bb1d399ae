"""Layer dropout of probability zero, inside transforms: some models draw a number all the same and branch on it.

A draw of one is never below the probability, so no layer is left out, which is what zero means. Outside transforms the
model draws as ever; with another probability the branch stays, and `vmap` refuses it: which layers run cannot differ
from row to row.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn

from opake.patching.instance import layers, mentioned_names, unbound
from opake.patching.replace import globals_read, overlay
from opake.patching.undo import Skip, Undo
from opake.transforms import inside_transform

PROBABILITY = "layerdrop"


class TorchWithoutLayerDrop:
    """The module `torch` as a forward sees it, whose scalar `rand([])` is one inside transforms."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def rand(self, *size: Any, **options: Any) -> Any:
        if size == ([],) and not options and inside_transform():
            return 1.0
        return torch.rand(*size, **options)


def sites(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules with a layer dropout whose forward draws a number."""
    for name, module in model.named_modules():
        mentioned = (mentioned_names(layer.__code__) for layer in layers(unbound(module, "forward")))
        if hasattr(module, PROBABILITY) and any("rand" in names for names in mentioned):
            yield name, module


def fits(module: nn.Module) -> Skip | None:
    probability = getattr(module, PROBABILITY)
    return (
        Skip(f"{PROBABILITY} is {probability}: which layers run would differ from row to row") if probability else None
    )


def apply(module: nn.Module) -> Undo:
    read = globals_read(module, lambda value: isinstance(value, ModuleType) and value is torch)
    return overlay(module, dict.fromkeys(read, TorchWithoutLayerDrop()))
