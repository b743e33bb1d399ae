"""What a PEFT layer would compute right now, as arguments of a fused op, or the reason why only PEFT can compute it.

Asked at every forward, so it reads dictionaries and flags alone: `set_adapter`, `merge`, `disable_adapter`,
`requires_grad_` and dropout change after patching. Every fact about PEFT's classes is in this file. Leaves out which
layers belong together.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, NamedTuple

import torch
from torch import nn

from opake.patching.instance import called_around, hooked, untouched
from opake_kernels.launch import autocasting
from opake_kernels.tracked import trained

# variants whose forward is that of plain LoRA
PLAIN_VARIANTS = frozenset({"MiCALinearVariant"})
# subclasses of nn.Linear that compute x W^T + bias in other words
WRITTEN_OUT = frozenset({("transformers.models.falcon.modeling_falcon", "FalconLinear")})
# weights that functional_call or a transform puts in place are plain tensors; subclasses have arithmetic of their own
PLAIN_TENSORS = (torch.Tensor, nn.Parameter)


class Projection(NamedTuple):
    """y = x W^T + (x A) B * scaling + bias; A and B are None for a base projection.

    `adapter`: its name, `parameters`: those of the adapter, below the module.
    """

    W: torch.Tensor
    A: torch.Tensor | None
    B: torch.Tensor | None
    scaling: float
    bias: torch.Tensor | None
    adapter: str | None = None
    parameters: tuple[str, ...] = ()


@functools.cache
def _classes() -> tuple[type, type]:
    from peft.tuners.lora.layer import Linear, LoraLayer

    return Linear, LoraLayer


@functools.cache
def _conv1d() -> type:
    from transformers.pytorch_utils import Conv1D

    return Conv1D


def is_linear(module: object) -> bool:
    """Whether this is exactly PEFT's LoRA around a linear layer; subclasses compute something else."""
    return "peft.tuners.lora.layer" in sys.modules and type(module) is _classes()[0]


def is_lora(module: object) -> bool:
    """Whether this is any LoRA layer of PEFT."""
    return "peft.tuners.lora.layer" in sys.modules and isinstance(module, _classes()[1])


def is_projection(module: object) -> bool:
    """Whether this is a linear layer with LoRA that `read` can describe: PEFT's, or one of our own."""
    return is_linear(module) or "_opake_projection" in vars(type(module))


def is_parameter(module: object) -> bool:
    """Whether this is PEFT's LoRA around a bare parameter of another module."""
    return is_lora(module) and type(module).__name__ == "ParamWrapper"


def read(module: Any, x: torch.Tensor | None = None) -> Projection | str:
    """The projection that `module` computes for `x` (None: for any input it can take), or why it is not one."""
    if type(module) is nn.Linear:
        found = _base(module, module)
    elif is_linear(module):
        found = _lora(module)
    elif (own := vars(type(module)).get("_opake_projection")) is not None:
        # of the class itself: a subclass computes something else
        found = own(module)
    else:
        return f"it is a {type(module).__name__}"
    return found if x is None or isinstance(found, str) else _taking(found, module, x)


def _taking(found: Projection, module: Any, x: torch.Tensor) -> Projection | str:
    W, device = found.W, x.device
    if type(x) not in PLAIN_TENSORS:
        return f"the input is a {type(x).__name__}"
    if device != W.device:
        return "the input is on another device than the weight"
    if x.dtype != W.dtype and not autocasting(x):
        return "the input has another dtype than the weight"
    if found.A is not None and found.A.dtype != x.dtype and not getattr(module, "cast_input_dtype_enabled", True):
        return "casting of the input is disabled"
    return found


def _lora(module: Any) -> Projection | str:
    children = module._modules
    if module._disable_adapters:
        return "adapters are disabled"
    if module.merged_adapters:
        return "adapters are merged"
    factors, names = children["lora_A"]._modules, module._active_adapter
    active = [name for name in ((names,) if isinstance(names, str) else names) if name in factors]
    base = _base(children["base_layer"], module)
    if isinstance(base, str) or not active:
        return base
    if len(active) > 1:
        return "several adapters are active"
    return _with_adapter(module, base, active[0])


def _with_adapter(module: Any, base: Projection, name: str) -> Projection | str:
    children: dict[str, Any] = module._modules
    variant = getattr(module, "lora_variant", {}).get(name)
    if variant is not None and type(variant).__name__ not in PLAIN_VARIANTS:
        return f"the adapter is a {type(variant).__name__}"
    dropout = children["lora_dropout"]._modules[name]
    if type(dropout) is not nn.Identity and not (
        type(dropout) is nn.Dropout and (not dropout.training or not dropout.p)
    ):
        return "LoRA dropout is active"
    down: Any = children["lora_A"]._modules[name]
    up: Any = children["lora_B"]._modules[name]
    if type(down) is not nn.Linear or type(up) is not nn.Linear:
        return f"the adapter is made of {type(down).__name__} and {type(up).__name__}"
    if hooked(down) or hooked(up) or hooked(dropout):
        return "there is a hook inside the adapter"
    A: Any = down._parameters["weight"]
    B: Any = up._parameters["weight"]
    extra = up._parameters["bias"]
    if not plain_matrix(A) or not plain_matrix(B):
        return "the adapter's weights are no plain matrices"
    if down._parameters["bias"] is not None:
        return "lora_A has a bias"
    scaling, bias = module.scaling[name], base.bias
    if isinstance(scaling, torch.Tensor):
        return "the scaling is a tensor"
    if extra is not None:
        bias = extra * scaling if bias is None else bias + extra * scaling
    names = (f"lora_A.{name}.weight", f"lora_B.{name}.weight", f"lora_B.{name}.bias")
    return Projection(base.W, A.mT, B.mT, scaling, bias, name, names)


def _base(layer: Any, module: nn.Module) -> Projection | str:
    """The base projection of `module`, which may be `layer` itself."""
    found = base_projection(layer)
    if isinstance(found, str):
        return found
    if getattr(module, "fan_in_fan_out", False) == is_product(layer):
        return "fan_in_fan_out contradicts the base layer"
    # a forward of ours is no hook: that of a head defers logits, which nobody asks for once there is an adapter on it
    if layer is not module and (called_around(layer) or not untouched(layer, "forward")):
        return "there is a hook on the base layer"
    return found


def is_product(layer: object) -> bool:
    """Whether this computes x W^T + bias and nothing else, by its class."""
    cls = type(layer)
    return cls is nn.Linear or (cls.__module__, cls.__qualname__) in WRITTEN_OUT


def base_projection(layer: Any, *kinds: type) -> Projection | str:
    """The projection that a plain linear layer, or one of exactly these kinds, computes; its weights are frozen."""
    transposed = not is_product(layer) and type(layer) not in kinds
    if transposed and type(layer) is not _conv1d():
        return f"the base layer is a {type(layer).__name__}"
    if not {"weight", "bias"} <= layer._parameters.keys():
        # spectral_norm, weight_norm and prune compute one of them in a hook, from parameters of other names
        return "the base weight or bias is computed in a hook"
    W: Any = layer._parameters["weight"]
    bias: Any = layer._parameters["bias"]
    if not _plain(W) or W.dim() != 2 or not (bias is None or _plain(bias)):
        return "the base weight is no plain matrix"
    if trained(W):
        return "the base weight is trainable"
    if bias is not None and (bias.requires_grad or bias.dim() != 1):
        return "the base bias is trainable"
    return Projection(W.mT if transposed else W, None, None, 1.0, bias)


def plain_matrix(weight: Any) -> bool:
    """Whether this is the weight of an adapter as the ops take it, an example axis included."""
    return _plain(weight) and weight.dim() in (2, 3)


def _plain(tensor: Any) -> bool:
    return type(tensor) in PLAIN_TENSORS and tensor.is_floating_point()


def traced() -> bool:
    """Whether torch.compile, torch.export or torch.jit.trace looks on: they are shown plain torch."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


def parameters_of(projection: Projection | str, prefix: str = "") -> frozenset[str]:
    """Names of the parameters, below the module, that the op takes with an example axis."""
    if isinstance(projection, str) or projection.adapter is None:
        return frozenset()
    return frozenset(prefix + name for name in projection.parameters)
