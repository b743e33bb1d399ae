"""What an adapter must know of the layer beside it: (in, out), dtype and device, whatever kind of layer it is.

Linear layers, GPT-2's `Conv1D` and modules with a bare weight (out, in), as most routers are. Quantised weights have
shapes of their own; there the layer's declared features count.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import nn

from opake.errors import InputError


class Shape(NamedTuple):
    """Sizes of a linear map, and where its weight lives. `dtype` is that of the weight, quantised ones included."""

    in_features: int
    out_features: int
    dtype: torch.dtype
    device: torch.device


def is_conv1d(module: object) -> bool:
    """Whether this is GPT-2's linear layer, whose weight is (in, out)."""
    utils = sys.modules.get("transformers.pytorch_utils")
    return utils is not None and isinstance(module, utils.Conv1D)


def shape_of(module: Any) -> Shape:
    """The shape of a layer that computes x W^T.

    Raises:
        InputError: no linear layer, and no module with a two-dimensional `weight`.
    """
    weight = getattr(module, "weight", None)
    if not isinstance(module, nn.Module) or not isinstance(weight, torch.Tensor):
        raise InputError(
            f"a LoRA adapter goes beside a linear layer, got {type(module).__name__}; "
            "pass an nn.Linear, a Conv1D, or a module with a weight of shape (out, in)"
        )
    if is_conv1d(module):
        out_features, in_features = weight.shape[1], weight.shape[0]
    elif isinstance(module, nn.Linear):
        out_features, in_features = module.out_features, module.in_features
    elif weight.dim() == 2:
        out_features, in_features = weight.shape
    else:
        raise InputError(f"{type(module).__name__}.weight has shape {tuple(weight.shape)}, expected (out, in)")
    return Shape(in_features, out_features, weight.dtype, weight.device)
