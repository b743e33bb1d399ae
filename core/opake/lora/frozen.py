"""A frozen layer whose weight is no plain matrix, called inside a transform as the linear map that it is.

Libraries for quantised weights have operators of their own, of which `torch.func` knows nothing. Their layers act on
the last dimension alone and are not trained, so an example axis is one more leading dimension, and the gradient of the
input is what their own backward says, asked for outside of any transform. Leaves out layers that are trained.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from opake.transforms import inside_transform

from .layers import PLAIN_TENSORS


def call(layer: nn.Module, x: torch.Tensor) -> Any:
    """`layer(x)`; inside a transform, a layer that torch.func cannot look into is called outside of it."""
    return _Call.apply(x, layer) if inside_transform() and is_opaque(layer) else layer(x)


def is_opaque(layer: Any) -> bool:
    """Whether this is a linear layer of quantised or otherwise special weights, none of them trained."""
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    if not isinstance(layer, nn.Linear) or not isinstance(weight, torch.Tensor) or weight.requires_grad:
        return False
    plain = type(weight) in PLAIN_TENSORS and weight.is_floating_point()
    return not plain and (bias is None or (type(bias) is nn.Parameter and not bias.requires_grad))


class _Call(torch.autograd.Function):
    """x -> layer(x)."""

    @staticmethod
    def forward(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        return layer(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.layer = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return _Pullback.apply(x, grad, ctx.layer), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, layer: nn.Module) -> Any:  # type: ignore[override]
        return _Call.apply(x.movedim(in_dims[0], 0), layer), 0


class _Pullback(torch.autograd.Function):
    """(x, gradient of layer(x)) -> gradient of x."""

    @staticmethod
    def forward(x: torch.Tensor, grad: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(layer(x), x, grad)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        raise RuntimeError("a layer of quantised weights has one derivative, in reverse; there is no second one")

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, grad: torch.Tensor, layer: nn.Module) -> Any:  # type: ignore[override]
        rows = [
            each.movedim(axis, 0) if axis is not None else each.expand(info.batch_size, *each.shape)
            for each, axis in zip((x, grad), in_dims[:2], strict=True)
        ]
        return _Pullback.apply(*rows, layer), 0
