"""Which adapters the fused ops of a step will ask for in a lower precision than they are kept in."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from opake_kernels.lora.ahead import cast_ahead

from . import layers

Params = Mapping[str, torch.Tensor]


def casting(wanted: tuple[list[str], torch.dtype] | None, params: Params) -> contextlib.AbstractContextManager:
    """A context in which these parameters stand ready in the dtype that `lower_precision` found for them."""
    if wanted is None:
        return contextlib.nullcontext()
    names, dtype = wanted
    return cast_ahead([params[name] for name in names if name in params], dtype)


def lower_precision(model: nn.Module) -> tuple[list[str], torch.dtype] | None:
    """Names, and the dtype of the base layer, of LoRA factors that a patched op takes and that have another dtype.

    First all A in the order of the modules, then all B: what projections of one input need together lies together. With
    base layers of several dtypes only the most frequent one is served.
    """
    from opake.patching.state import axis_parameters
    from opake.patching.target import locate

    inner = locate(model).model
    aware = set(axis_parameters(inner))
    taken = {id(p) for name, p in inner.named_parameters(remove_duplicate=False) if name in aware}
    found: dict[torch.dtype, list[list[str]]] = {}
    for prefix, module in model.named_modules():
        if layers.is_linear(module) and (weight := _base_weight(module)) is not None:
            groups = found.setdefault(weight.dtype, [[], []])
            for names, part in zip(groups, ("lora_A", "lora_B"), strict=True):
                names += _factors(f"{prefix}.{part}", getattr(module, part), weight, taken)
    best = max(found, key=lambda dtype: len(found[dtype][0]), default=None)
    names = [] if best is None else [*found[best][0], *found[best][1]]
    return (names, best) if best is not None and names else None


def _base_weight(module: Any) -> torch.Tensor | None:
    weight = module._modules["base_layer"]._parameters.get("weight")
    return weight if weight is not None and weight.is_floating_point() else None


def _factors(prefix: str, adapters: Any, base: torch.Tensor, taken: set[int]) -> list[str]:
    weights = {name: getattr(adapter, "weight", None) for name, adapter in adapters.items()}
    return [
        f"{prefix}.{name}.weight"
        for name, w in weights.items()
        if w is not None and id(w) in taken and w.dtype != base.dtype and w.device == base.device
    ]
