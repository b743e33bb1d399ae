"""Adding an adapter to the weight beside it, for good; and when that is not possible."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from opake.errors import PatchError

from .gating import gating_module
from .layers import PLAIN_TENSORS
from .outputs import product_of
from .router import LoRATopKRouter
from .shapes import answered, is_conv1d
from .wrapper import AdapterWrapper


def require_mergeable(model: nn.Module, name: str, wrapper: AdapterWrapper) -> None:
    """Raise PatchError unless the weight is a plain one of a plain product, which no layer without an adapter uses."""
    holder = _holder(wrapper)
    weight: Any = holder._parameters.get("weight")
    plain = type(weight) in PLAIN_TENSORS and weight.is_floating_point()
    if not plain or not hasattr(wrapper.adapter, "delta_weight"):
        raise PatchError(
            f"{name}: a {type(holder).__name__} cannot take a {type(wrapper.adapter).__name__} into its weight; keep it"
        )
    if not _survives(wrapper, holder):
        raise PatchError(
            f"{name}: {type(holder).__name__} has a forward of its own, in which the adapter's term would come out as "
            "another if it were in the weight; keep the adapter"
        )
    ours = {id(module) for module in (wrapper, wrapper.to_wrap, holder)}
    for other, module in model.named_modules():
        if id(module) not in ours and any(p is weight for p in module._parameters.values()):
            raise PatchError(
                f"{name}.weight is shared with {other}, which has no adapter; merging would change both. "
                "Untie them first, or keep the adapter"
            )


@torch.no_grad()
def merge_into(wrapper: AdapterWrapper) -> None:
    """weight += the adapter's term, added in fp32 at least and rounded once."""
    holder = _holder(wrapper)
    weight: Any = holder._parameters["weight"]
    wide = torch.promote_types(weight.dtype, torch.float32)
    delta = copy.deepcopy(wrapper.adapter).to(wide).delta_weight().to(weight.device)  # type: ignore[operator]
    weight.copy_(weight.to(wide) + (delta.mT if is_conv1d(holder) else delta))


def _survives(wrapper: AdapterWrapper, layer: nn.Module) -> bool:
    """Whether a layer with a forward of its own answers the same with the adapter's term in its weight; on a copy."""
    plain = is_conv1d(layer) or getattr(type(layer), "forward", None) is nn.Linear.forward
    weight: Any = layer._parameters["weight"]
    if plain or isinstance(wrapper, LoRATopKRouter):
        return True
    twin: Any = copy.deepcopy(wrapper).eval()
    twin.enable_adapter_layers()
    rows = torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    want = answered(twin, rows)
    merge_into(twin)
    got = answered(twin.to_wrap, rows)
    if want is None or got is None or weight.is_meta:
        return False
    want, got = product_of(want).double(), product_of(got).double()
    loose = 1e-4 if weight.dtype.itemsize > 2 else 4e-2
    return bool((got - want).abs().max() <= loose * want.abs().max())


def _holder(wrapper: AdapterWrapper) -> nn.Module:
    return gating_module(wrapper.to_wrap)[1] if isinstance(wrapper, LoRATopKRouter) else wrapper.to_wrap
