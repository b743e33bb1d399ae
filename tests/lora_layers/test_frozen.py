"""Quantised layers, whose operators torch.func does not know, inside transforms: exact, and called plainly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from opake.checking.tiny import tiny_model
from opake.errors import PatchError
from opake.functional import clipped_grad, per_example_grads
from opake.lora import LinearAdapter, LoRALinear, apply_lora, merge_lora
from opake.lora.frozen import is_opaque
from opake.testing.oracle import model_loop_gradients, relative_error

from .subjects import BATCH, loop_and_vmap, patch, randomised, trainable


class Dequantise(torch.autograd.Function):
    """In the old form, which torch.func refuses, with values that a transform would hide."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(weight)
        seen.append((x.dim(), bool(torch.isfinite(x).all().item())))
        return x @ (weight.to(x.dtype) / 100).T

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return dy @ (weight.to(dy.dtype) / 100), None


# dimensions of the rows of each call, and whether they were finite
seen: list[tuple[int, bool]] = []


class Quantised(nn.Linear):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False)
        self.weight = nn.Parameter((layer.weight * 100).round().to(torch.int8), requires_grad=False)
        self.bias = layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = Dequantise.apply(x, self.weight)
        return out if self.bias is None else out + self.bias


Quantised.__module__ = "bitsandbytes.nn.modules"


def quantised(model: Any) -> Any:
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if type(child) is nn.Linear and name != "lm_head":
                setattr(owner, name, Quantised(child))
    return model.requires_grad_(False)


def test_torch_func_alone_cannot() -> None:
    layer = Quantised(nn.Linear(6, 4)).requires_grad_(False)
    with pytest.raises(RuntimeError, match="setup_context"):
        vmap(grad(lambda x: layer(x).sum()))(torch.randn(3, 6))


@pytest.mark.parametrize("shape", [(3, 6), (3, 5, 6), (3, 2, 5, 6)])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_through_several_layers(shape: tuple[int, ...], dropout: float) -> None:
    model = nn.Sequential(*(Quantised(nn.Linear(6, 6)) for _ in range(3))).double()
    apply_lora(model, dim=2, dropout=dropout, lora_dtype=torch.float64).eval()
    seen.clear()
    loop, got = loop_and_vmap(randomised(model), torch.randn(shape, dtype=torch.float64))
    assert len(loop) == 6
    for name, want in loop.items():
        torch.testing.assert_close(got[name], want)
    assert all(finite for _, finite in seen)
    assert {dims for dims, _ in seen} == {len(shape) - 1, len(shape)}


def test_any_axis_and_nesting() -> None:
    base = Quantised(nn.Linear(6, 4)).double().requires_grad_(False)
    layer: Any = randomised(LoRALinear(base, LinearAdapter(base, dim=2, lora_dtype=torch.float64)))
    params = {name: p.detach() for name, p in trainable(layer).items()}
    x = torch.randn(6, 3, 2, dtype=torch.float64)

    def value(params: Any, row: torch.Tensor) -> torch.Tensor:
        return functional_call(layer, params, (row,)).sin().sum()

    got = vmap(vmap(grad(value), in_dims=(None, 1)), in_dims=(None, 1))(params, x)
    for i, j in ((i, j) for i in range(3) for j in range(2)):
        want = grad(value)(params, x[:, i, j])
        for name, each in want.items():
            torch.testing.assert_close(got[name][i, j], each)
    rows = grad(lambda x: value(params, x.movedim(0, -1)))(x)
    free = x.clone().requires_grad_()
    torch.testing.assert_close(rows, torch.autograd.grad(value(params, free.movedim(0, -1)), free)[0])


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_per_example_gradients_of_a_model(model_type: str) -> None:
    model = randomised(apply_lora(quantised(tiny_model(model_type)), lora_dtype=torch.float32))
    want = model_loop_gradients(model, **BATCH)
    patch(model)
    assert relative_error(per_example_grads(model)(trainable(model), **BATCH), want) < 1e-5
    assert clipped_grad(model, clip_norm=1.0)(trainable(model), **BATCH).engine == "vmap"


def test_only_frozen_special_weights_are_meant() -> None:
    layer = Quantised(nn.Linear(6, 4))
    assert not is_opaque(layer), "its bias is trained"
    assert is_opaque(layer.requires_grad_(False))
    assert not is_opaque(nn.Linear(6, 4).requires_grad_(False))
    assert not is_opaque(nn.Linear(6, 4))
    assert not is_opaque(nn.Conv1d(6, 4, 1))


class Special(torch.Tensor):
    """A weight with arithmetic of its own."""


def test_weights_of_special_classes_are_opaque_and_not_merged_into() -> None:
    layer = nn.Linear(6, 4).double()
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Special), requires_grad=False)
    layer.requires_grad_(False)
    assert type(layer.weight) is Special
    assert is_opaque(layer)
    model = randomised(apply_lora(nn.Sequential(layer), "0", dim=2))
    loop, got = loop_and_vmap(model, torch.randn(3, 5, 6, dtype=torch.float64))
    assert relative_error(got, loop) < 1e-9
    with pytest.raises(PatchError, match="0: a Linear cannot take a LinearAdapter into its weight"):
        merge_lora(model)


def test_there_is_no_second_derivative() -> None:
    base = Quantised(nn.Linear(6, 4)).requires_grad_(False)
    layer = randomised(LoRALinear(base, LinearAdapter(base, dim=2, lora_dtype=torch.float32)))

    def slope(x: torch.Tensor) -> torch.Tensor:
        return grad(lambda x: layer(x).pow(2).sum())(x).pow(2).sum()

    with pytest.raises(RuntimeError, match="quantised weights has one derivative, in reverse; there is no second one"):
        vmap(grad(slope))(torch.randn(3, 6))
