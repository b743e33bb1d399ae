"""LoRA on a bare parameter (`target_parameters`: stacked experts, routers) inside transforms.

PEFT puts the adapted weight in place with `torch.nn.utils.parametrize`, which writes into tensors that a transform has
captured. Inside one, the same sum takes the place of the parameter for the length of the call instead; elsewhere PEFT's
own code runs. Such a weight is as large as the stack, for each example. Where the experts are computed by `opake_moe`
they are handed the factors, in and out of transforms, and no sum is formed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from opake.experts import adapters
from opake.patching.instance import untouched, wrap_method
from opake.patching.undo import Skip, Undo
from opake.transforms import inside_transform

from .layers import is_parameter


def sites(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if is_parameter(module):
            yield name, module


def fits(module: nn.Module) -> Skip | None:
    return None if untouched(module, "forward") else Skip("its forward was replaced by somebody else")


def apply(module: nn.Module) -> Undo:
    return Undo([wrap_method(module, "forward", _forward)])


def axis_parameters(module: Any) -> frozenset[str]:
    """The factors of stacked experts, where the experts take them."""
    if not adapters.takes(module.get_base_layer(), module.parameter_name):
        return frozenset()
    return frozenset(f"lora_{side}.{name}.weight" for side in "AB" for name in module.lora_A)


def _forward(inner: Callable[..., Any], self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    active = [] if self.disable_adapters or self.merged else [a for a in self.active_adapters if a in self.lora_A]
    # a mixed batch is refused by PEFT; fp8 is added in another precision than that of the parameter
    plain = "adapter_names" not in kwargs and self.get_param().dtype.itemsize > 1
    if not active or not plain:
        return inner(self, x, *args, **kwargs)
    if adapters.takes(self.get_base_layer(), self.parameter_name):
        with adapters.handed(self.get_base_layer(), self.parameter_name, adapters.factors(self, active)):
            return self.base_layer(x, *args, **kwargs)
    if not inside_transform():
        return inner(self, x, *args, **kwargs)
    weight = self.get_param()
    for adapter in active:
        weight = weight + self.get_delta_weight(adapter)
    with _placed(self.get_base_layer(), self.parameter_name, weight):
        return self.base_layer(x, *args, **kwargs)


@contextlib.contextmanager
def _placed(owner: nn.Module, name: str, tensor: torch.Tensor) -> Iterator[None]:
    before = owner._parameters[name]
    owner._parameters[name] = tensor  # type: ignore[assignment]
    try:
        yield
    finally:
        owner._parameters[name] = before
