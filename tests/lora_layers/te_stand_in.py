"""A stand-in for the part of Transformer Engine that `TEFusedLoRALinear` uses: its signatures, its sharing, its checks.

The operations take exactly the documented arguments, so a wrong call is a TypeError as it is there, and compute on any
device what theirs compute on CUDA.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

# arguments of the constructors in transformer_engine.pytorch.ops, 2.8 to 2.20; a star: keywords follow
SIGNATURES: dict[str, tuple[str, ...]] = {
    "Linear": (
        "in_features",
        "out_features",
        "*",
        "bias=True",
        "device=None",
        "dtype=None",
        "tensor_parallel_mode=None",
        "tensor_parallel_group=None",
        "sequence_parallel=False",
        "rng_state_tracker_function=None",
        "accumulate_into_main_grad=False",
    ),
    "LayerNorm": (
        "normalized_shape",
        "*",
        "eps=1e-05",
        "device=None",
        "dtype=None",
        "zero_centered_gamma=False",
        "sm_margin=0",
    ),
    "RMSNorm": (
        "normalized_shape",
        "*",
        "eps=1e-05",
        "device=None",
        "dtype=None",
        "zero_centered_gamma=False",
        "sm_margin=0",
    ),
    "Quantize": ("forward=True", "backward=False"),
    "Dropout": ("p",),
    "ConstantScale": ("scale",),
    "MakeExtraOutput": ("*", "in_place=False"),
    "AddExtraInput": ("*", "in_place=False"),
}


def signature_of(cls: type) -> tuple[str, ...]:
    """The arguments of a constructor in the form of SIGNATURES."""
    found: list[str] = []
    for parameter in list(inspect.signature(cls.__init__).parameters.values())[1:]:
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in found:
            found.append("*")
        default = "" if parameter.default is inspect.Parameter.empty else f"={parameter.default!r}"
        found.append(parameter.name + default)
    return tuple(found)


class Op(nn.Module):
    """An operation of the fuser."""

    inputs = outputs = 0

    def run(self, x: torch.Tensor, extra: list[torch.Tensor]) -> torch.Tensor:
        raise NotImplementedError


class Linear(Op):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Any = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        super().__init__()
        assert (tensor_parallel_mode, tensor_parallel_group, sequence_parallel) == (None, None, False)
        assert device == "meta", "no second copy of the weights"
        self.has_bias, self.accumulate_into_main_grad = bias, accumulate_into_main_grad
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "bias" and value is not None and not self.has_bias:
            raise ValueError("Attempted to set bias parameter in Linear operation that does not have bias enabled")
        super().__setattr__(name, value)

    def run(self, x: torch.Tensor, extra: list[torch.Tensor]) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


class LayerNorm(Op):
    def __init__(
        self,
        normalized_shape: int,
        *,
        eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
        zero_centered_gamma: bool = False,
        sm_margin: int = 0,
    ) -> None:
        super().__init__()
        self.eps, self.centred = eps, zero_centered_gamma
        self.weight = nn.Parameter(torch.empty(normalized_shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty_like(self.weight))

    def run(self, x: torch.Tensor, extra: list[torch.Tensor]) -> torch.Tensor:
        return functional.layer_norm(x, x.shape[-1:], self.weight + self.centred, self.bias, self.eps)


class RMSNorm(Op):
    def __init__(
        self,
        normalized_shape: int,
        *,
        eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
        zero_centered_gamma: bool = False,
        sm_margin: int = 0,
    ) -> None:
        super().__init__()
        self.eps, self.centred = eps, zero_centered_gamma
        self.weight = nn.Parameter(torch.empty(normalized_shape, device=device, dtype=dtype))

    def run(self, x: torch.Tensor, extra: list[torch.Tensor]) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weight + self.centred, self.eps)


class Quantize(Op):
    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        assert (forward, backward) == (True, False)

    def run(self, x: torch.Tensor, extra: list[torch.Tensor]) -> torch.Tensor:
        return x


class Dropout(Op):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def run(self, x: torch.Tensor, extra: list[torch.Tensor]) -> torch.Tensor:
        return functional.dropout(x, self.p, self.training)


class ConstantScale(Op):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def run(self, x: torch.Tensor, extra: list[torch.Tensor]) -> torch.Tensor:
        return x * self.scale


class MakeExtraOutput(Op):
    outputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        assert in_place, "the fork's gradient is accumulated by the product behind it"

    def run(self, x: torch.Tensor, extra: list[torch.Tensor]) -> torch.Tensor:
        extra.append(x)
        return x


class AddExtraInput(Op):
    inputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        assert in_place, "the product is what is added to"

    def run(self, x: torch.Tensor, extra: list[torch.Tensor]) -> torch.Tensor:
        return x + extra.pop()


class Sequential(nn.Module):
    """The fuser's container: extra outputs after the output, extra inputs after the input, neither more nor fewer."""

    def __init__(self, *args: nn.Module) -> None:
        super().__init__()
        self.ops = nn.ModuleList(args)

    def append(self, module: nn.Module) -> Sequential:
        assert isinstance(module, Op)
        self.ops.append(module)
        return self

    def forward(self, input: torch.Tensor, *extra_inputs: torch.Tensor) -> Any:
        assert len(extra_inputs) == sum(op.inputs for op in self.ops)  # type: ignore[misc]
        assert all(not each.is_meta for op in self.ops for each in op.parameters()), "a parameter was not shared"
        fp8.append(state.fp8)
        extra = list(extra_inputs)
        for op in self.ops:
            input = op.run(input, extra)  # type: ignore[operator]
        assert len(extra) == sum(op.outputs for op in self.ops)  # type: ignore[misc]
        return (input, *extra) if extra else input


class TELinear(nn.Module):
    """As te.Linear, which is no nn.Linear: an empty tensor where there is no bias."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.randn(out_features, in_features))
        self.bias: Any = nn.Parameter(torch.randn(out_features)) if bias else torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias if self.bias.numel() else None)


class LayerNormLinear(nn.Module):
    """As te.LayerNormLinear, asked for the norm's output."""

    def __init__(self, normalization: str, centred: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features, self.eps = 6, 4, 1e-5
        self.normalization, self.zero_centered_gamma = normalization, centred
        self.layer_norm_weight = nn.Parameter(torch.randn(6))
        self.layer_norm_bias = nn.Parameter(torch.randn(6)) if normalization == "LayerNorm" else None
        self.weight, self.bias = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> Any:
        gamma = self.layer_norm_weight + self.zero_centered_gamma
        if self.normalization == "LayerNorm":
            normed = functional.layer_norm(x, (6,), gamma, self.layer_norm_bias, self.eps)
        else:
            normed = functional.rms_norm(x, (6,), gamma, self.eps)
        return (functional.linear(normed, self.weight, self.bias), normed), None


state = SimpleNamespace(fp8=True)
# whether fp8 was on, for each branch that ran
fp8: list[bool] = []


@contextlib.contextmanager
def fp8_autocast(enabled: bool = True) -> Iterator[None]:
    before, state.fp8 = state.fp8, enabled
    yield
    state.fp8 = before


def install(monkeypatch: Any) -> Any:
    """Put the stand-in under the names of Transformer Engine; `transformer_engine.pytorch`."""
    ops: Any = ModuleType("transformer_engine.pytorch.ops")
    for name in SIGNATURES:
        setattr(ops, name, globals()[name])
    ops.Sequential = Sequential
    pytorch: Any = ModuleType("transformer_engine.pytorch")
    pytorch.Linear, pytorch.LayerNormLinear = TELinear, LayerNormLinear
    pytorch.fp8_autocast, pytorch.ops = fp8_autocast, ops
    root: Any = ModuleType("transformer_engine")
    root.pytorch = pytorch
    for module in (root, pytorch, ops):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    fp8.clear()
    return pytorch
