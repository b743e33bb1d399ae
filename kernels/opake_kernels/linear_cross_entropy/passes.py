"""What a back end is asked for in one pass over tokens, and what it gives back: the seam between op.py and both.

A pass serves one weight: x (R, H), weight (V, H), bias (V) or None, labels (R). It computes the loss and the log of
the sum of exponentials of each token and, as `need` says, gradients of the sum of the token losses, each token's times
`scale` if given. Grouping, reduction and autograd are op.py's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from opake_kernels.cross_entropy import CrossEntropySettings

__all__ = ["Gradients", "Head", "Need", "Plan", "accumulator_dtype", "product_into"]


class Need(NamedTuple):
    """Which gradients are asked for."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """The loss, the widest vocabulary tile (0: the fused back end, -1: any), and the gradients that may be wanted."""

    loss: CrossEntropySettings
    width: int
    eager: Need


@dataclass(frozen=True, slots=True)
class Head:
    """The arguments of a pass: x (R, H), weight (V, H), bias (V), labels and scale (R).

    No pass is told what an earlier one over the same tokens found: the library may round a logit otherwise in a product
    of another size, and a softmax that is not the one of these logits gives a confident token a gradient it has not.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    labels: torch.Tensor
    settings: CrossEntropySettings
    scale: torch.Tensor | None = None


class Gradients(NamedTuple):
    """Results of a pass: loss (R), hidden (R, H) in the dtype of x, weight (V, H) and bias (V) in fp32.

    float64 arguments give float64 throughout.
    """

    loss: torch.Tensor
    hidden: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def product_into(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, first: bool) -> None:
    """total = a @ b, or total += a @ b, summed in the wide dtype of `total` whatever the dtype of the factors."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=0.0 if first else 1.0, out=total)
    elif total.is_cuda:
        # the matrix unit adds to the float32 total without rounding the product in between
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=0.0 if first else 1.0, out=total)
    else:
        product = a.to(total.dtype) @ b.to(total.dtype)
        total.copy_(product) if first else total.add_(product)
