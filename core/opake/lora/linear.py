"""`LoRALinear`: a linear layer plus its adapter, one fused product wherever that says the same."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from opake.errors import InputError, PatchError
from opake_kernels.lora import opake_lora_w

from . import frozen
from .adapter import LinearAdapter
from .layers import Projection, read, traced
from .outputs import read_output
from .own import own_projection
from .shapes import is_conv1d
from .wrapper import AdapterWrapper

# they read the attribute and put back what they got, by which the adapter's term would get into the weight
MOVERS = ("torch.distributed.", "accelerate.")


class LoRALinear(AdapterWrapper):
    """base(x) + adapter(x), in the form in which the base answers.

    A tensor comes back as a tensor. (out, bias), ((out, normed), bias) and (out, bias, normed) come back as they are,
    with the adapter's term in `out`; it is computed from `normed` where there is one, else from x: a layer with a norm
    inside that does not return the norm's output gets the term of the rows before the norm, which `FusedLoRALinear`
    computes after it. Further arguments go to the base, and to the adapter if its forward takes them; `LinearAdapter`
    takes none. Raises InputError for an adapter of other sizes than the layer's.

    fuse: False takes the unfused sum, which has derivatives of any order and in forward mode
    """

    fuse: bool = True

    def __init__(self, to_wrap: nn.Module, adapter: nn.Module) -> None:
        super().__init__(to_wrap, adapter)
        own, its = _sizes(to_wrap), _sizes(adapter)
        if own is not None and its is not None and own != its:
            raise InputError(
                f"{type(to_wrap).__name__} maps {own[0]} to {own[1]} and the adapter {its[0]} to {its[1]}; make it of "
                "the layer, LinearAdapter(layer)"
            )

    @property
    def weight(self) -> torch.Tensor:
        """The base weight itself while disabled, else the base weight plus the adapter's term, differentiable.

        Libraries that move or shard what is stored under the name (FSDP, accelerate) are given what is stored.
        """
        base: Any = self.to_wrap.weight
        if not self._adapter_enabled or (
            not traced() and sys._getframe(1).f_globals.get("__name__", "").startswith(MOVERS)
        ):
            return base
        delta = _delta_of(self.adapter)
        delta = delta.mT if is_conv1d(self.to_wrap) else delta
        if delta.shape != base.shape:
            raise PatchError(
                f"LoRA effective weight shape mismatch: {type(self.to_wrap).__name__}.weight has shape "
                f"{tuple(base.shape)} and the adapter's term {tuple(delta.shape)}; read to_wrap.weight instead"
            )
        return base + delta.to(device=base.device, dtype=base.dtype)

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias of the base, the object itself."""
        bias: Any = getattr(self.to_wrap, "bias", None)
        return bias

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs and not traced():
            found = read(self, x)
            if isinstance(found, Projection) and found.adapter is not None:
                return opake_lora_w(x, found.W, found.A, found.B, found.scaling, found.bias)
        return self._separately(x, *args, **kwargs)

    def _separately(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = self.to_wrap(x, *args, **kwargs) if args or kwargs else frozen.call(self.to_wrap, x)
        if not self._adapter_enabled:
            return result
        base = read_output(result, self.to_wrap, x)
        delta = self.adapter_forward(self.adapter, base.linear_input.contiguous(), *args, **kwargs)
        return base.rebuild(base.output + delta.reshape(base.output.shape).to(base.output.dtype))

    def _opake_projection(self) -> Projection | str:
        return own_projection(self)


def _sizes(module: Any) -> tuple[int, int] | None:
    """(in, out) of a module that says so."""
    if is_conv1d(module):
        return module.nx, module.nf
    found = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return None if None in found else found  # type: ignore[return-value]


def _delta_of(adapter: nn.Module) -> torch.Tensor:
    if isinstance(adapter, LinearAdapter) or hasattr(adapter, "delta_weight"):
        return adapter.delta_weight()  # type: ignore[operator]
    raise PatchError(
        f"{type(adapter).__name__} does not say what it adds to a weight: give it a method delta_weight(), "
        "or read to_wrap.weight"
    )
