"""What an adapter must know of the layer beside it: (in, out), dtype and device, whatever kind of layer it is.

Linear layers, GPT-2's `Conv1D` and modules with a bare weight (out, in), as most routers are. Quantised weights have
shapes of their own; there the layer's declared features count. A subclass of nn.Linear with a forward of its own is
asked what it answers: some are linear layers written differently, others take or return something else.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from opake.errors import InputError

# a subclass of nn.Linear with a forward of its own is linear still where these write it, and may not run everywhere
QUANTISED = ("bitsandbytes", "torchao", "transformers.integrations", "torch.ao", "torch.nn")
# lookups by index, which have weights of two dimensions as well
LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


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


def is_linear_map(module: nn.Module) -> bool:
    """Whether this takes (..., in) to (..., out) as a linear layer does, quantised ones included."""
    if is_conv1d(module):
        return True
    if not isinstance(module, nn.Linear) or isinstance(module.weight, UninitializedParameter):
        return False
    return answers_linearly(module)


def answers_linearly(module: Any) -> bool:
    """Whether a linear layer answers as one; what is not of nn.Linear is believed."""
    if not isinstance(module, nn.Linear):
        return True
    if type(module).forward is nn.Linear.forward or type(module).__module__.startswith(QUANTISED):
        return True
    rows = torch.zeros(2, module.in_features, dtype=module.weight.dtype, device=module.weight.device)
    answer = answered(module, rows)
    return isinstance(answer, torch.Tensor) and answer.shape == (2, module.out_features)


@torch.no_grad()
def answered(layer: Any, rows: torch.Tensor) -> Any:
    """What the forward of a layer returns for these rows, hooks aside; None where it fails. Random numbers are kept."""
    devices = [rows.device] if rows.is_cuda else []
    with torch.random.fork_rng(devices):
        try:
            return layer.forward(rows)
        except Exception:
            # whatever it needs, it is not called with rows alone
            return None


def shape_of(module: Any) -> Shape:
    """The shape of a layer that computes x W^T.

    Raises:
        InputError: no linear layer, and no module with a two-dimensional `weight`.
    """
    weight = getattr(module, "weight", None)
    if isinstance(weight, UninitializedParameter):
        raise InputError(f"{type(module).__name__} has no shape before its first forward; run one first")
    if not isinstance(module, nn.Module) or not isinstance(weight, torch.Tensor) or isinstance(module, LOOKUPS):
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
    return Shape(in_features, out_features, weight.dtype, _home(module, weight))


def _home(module: Any, weight: torch.Tensor) -> torch.device:
    """Where the layer computes: accelerate keeps offloaded weights elsewhere, and meta tensors in their place."""
    device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    if not weight.is_meta or device is None:
        return weight.device
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
