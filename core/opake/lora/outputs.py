"""The forms in which a linear layer answers: a tensor, or a tuple with its bias, its norm's output, or both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from opake.errors import InputError


class Output(NamedTuple):
    """What a layer returned: the product, a bias that is not yet added, the input of the product, and its form.

    `rebuild(output)` is the answer in the same form with another product in it.
    """

    output: torch.Tensor
    bias: torch.Tensor | None
    linear_input: torch.Tensor
    rebuild: Callable[[torch.Tensor], Any]


def read_output(result: Any, layer: nn.Module, x: torch.Tensor) -> Output:
    """Take `result = layer(x)` apart.

    Forms: out | (out, bias) | ((out, normed), bias) | (out, bias, normed). Raises InputError for any other.
    """
    if isinstance(result, torch.Tensor):
        return Output(result, getattr(layer, "bias", None), x, lambda out: out)
    if isinstance(result, tuple) and len(result) == 2 and _is_pair(result[0]):
        (out, normed), bias = result
        return Output(out, bias, normed, lambda out: ((out, normed), bias))
    if isinstance(result, tuple) and len(result) in (2, 3) and isinstance(result[0], torch.Tensor):
        out, bias, *rest = result
        return Output(out, bias, rest[0] if rest else x, lambda out: (out, bias, *rest))
    shown = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
    raise InputError(
        f"{type(layer).__name__} should return a tensor or a tuple (out, bias), ((out, normed), bias) or "
        f"(out, bias, normed); it returned {shown}. A layer of another kind needs a wrapper of its own"
    )


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(each, torch.Tensor) for each in value)


def product_of(result: Any) -> torch.Tensor:
    """The product in an answer of any form, its bias added where the layer left that to its caller."""
    if isinstance(result, torch.Tensor):
        return result
    product, bias = result[0], result[1]
    product = product[0] if isinstance(product, tuple) else product
    return product if bias is None or not bias.numel() else product + bias
