"""Gradient checkpointing of a frozen model: make the input of its layers require a gradient.

A reentrant checkpoint that gets no tensor with `requires_grad` cuts the graph: everything inside is recomputed without
a gradient, the loss is finite and every adapter's gradient is zero. With the embedding frozen that is the first layer's
case, and then every layer's. A hook on the embedding mends it, only while some layer checkpoints, and never inside a
transform, where it is neither allowed nor needed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from opake import hf
from opake.transforms import inside_transform


class InputGradients:
    """A forward hook of an embedding: its output requires a gradient while one of `layers` checkpoints."""

    # the patches know hooks of this kind by their name
    __name__ = f"{hf.INPUT_GRAD_HOOK}_of_lora"

    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers = layers

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if not torch.is_grad_enabled() or not isinstance(output, torch.Tensor) or output.requires_grad:
            return None
        if inside_transform() or not any(getattr(layer, "gradient_checkpointing", False) for layer in self.layers):
            return None
        return output.detach().requires_grad_()


def install(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """Put the hook on every input embedding of the model; (module, hook id) of each."""
    layers = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    if not layers:
        return []
    hook = InputGradients(layers)
    return [(module, module.register_forward_hook(hook).id) for module in _embeddings(model)]


def uninstall(placed: list[tuple[nn.Module, int]]) -> None:
    """Take the hooks off again, whoever wrapped them since."""
    for module, key in placed:
        module._forward_hooks.pop(key, None)


def _embeddings(model: nn.Module) -> list[nn.Module]:
    found: dict[int, nn.Module] = {}
    for module in model.modules():
        if hf.is_pretrained(module):
            try:
                embedding: Any = module.get_input_embeddings()  # type: ignore[operator]
            except (AttributeError, NotImplementedError):
                continue
            if isinstance(embedding, nn.Module):
                found[id(embedding)] = embedding
    return list(found.values())
