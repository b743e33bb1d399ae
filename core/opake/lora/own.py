"""What a `LoRALinear` would compute right now, in the words of `layers.read`: so that our layers fuse as PEFT's do."""

from __future__ import annotations

from typing import Any

from torch import nn

from opake.patching.instance import hooked

from .adapter import LinearAdapter
from .layers import Projection, base_projection, plain_matrix

NAMES = ("adapter.linear_in.weight", "adapter.linear_out.weight")


def own_projection(module: Any) -> Projection | str:
    """The projection of a `LoRALinear`, or why it is not one."""
    layer, adapter = module._modules["to_wrap"], module._modules["adapter"]
    if not module._adapter_enabled:
        return "adapters are disabled"
    if not module.fuse:
        return "fusing is switched off"
    base = base_projection(layer)
    if isinstance(base, str):
        return base
    if hooked(layer):
        return "there is a hook on the base layer"
    return with_adapter(base, adapter)


def with_adapter(base: Projection, adapter: Any) -> Projection | str:
    """`base` with a `LinearAdapter` on it, or why the two are not one product."""
    kind = type(adapter)
    if kind is not LinearAdapter:
        return f"the adapter is a {kind.__name__}"
    dropout, down, up = (adapter._modules[name] for name in ("dropout", "linear_in", "linear_out"))
    if type(dropout) is not nn.Identity and not (
        type(dropout) is nn.Dropout and (not dropout.training or not dropout.p)
    ):
        return "LoRA dropout is active"
    if any(hooked(each) for each in (adapter, dropout, down, up)):
        return "there is a hook inside the adapter"
    if any(type(each) is not nn.Linear or each._parameters["bias"] is not None for each in (down, up)):
        return "the adapter is not made of two plain linear layers"
    A, B = down._parameters["weight"], up._parameters["weight"]
    if not plain_matrix(A) or not plain_matrix(B):
        return "the adapter's weights are no plain matrices"
    return Projection(base.W, A.mT, B.mT, adapter.scale, base.bias, "adapter", NAMES)
