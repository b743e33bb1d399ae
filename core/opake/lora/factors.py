"""An adapter as the two matrices of one low-rank product, whatever it is made of: x -> scale * (x A^T) B^T."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from opake.errors import InputError

from .adapter import LinearAdapter
from .canonical import CanonicalAdapter
from .gating import gating_module
from .router import LoRATopKRouter
from .shapes import answers_linearly
from .wrapper import AdapterWrapper


@dataclass(frozen=True, slots=True)
class Factors:
    """A (R, in), B (out, R) and the scale of an adapter; `parameter`: it sits beside a bare parameter."""

    A: torch.Tensor
    B: torch.Tensor
    scale: float
    dropout: float
    dropout_position: str
    parameter: bool = False


def factors_of(name: str, wrapper: AdapterWrapper) -> tuple[str, Factors]:
    """(name of the module whose weight is adapted, factors). InputError for what PEFT cannot have."""
    below, bare = "", False
    if isinstance(wrapper, LoRATopKRouter):
        below, _ = gating_module(wrapper.to_wrap)
        bare = not below
    elif getattr(wrapper.to_wrap, "normalization", None) or not answers_linearly(wrapper.to_wrap):
        raise InputError(f"{name}: PEFT and load_peft_adapter have no adapter for a {type(wrapper.to_wrap).__name__}")
    place = f"{name}.{below}" if below else name
    adapter: Any = wrapper.adapter
    if isinstance(adapter, CanonicalAdapter):
        return place, _side_by_side(adapter)
    if not isinstance(adapter, LinearAdapter):
        raise InputError(f"{name}: a {type(adapter).__name__} is no low-rank product, so PEFT cannot hold it")
    p = getattr(adapter.dropout, "p", 0.0)
    return place, Factors(
        adapter.linear_in.weight, adapter.linear_out.weight, adapter.scale, p, adapter.dropout_position, bare
    )


def _side_by_side(adapter: CanonicalAdapter) -> Factors:
    """One product with the ranks of all parts, B block by block; the scale is that of the first part."""
    made: dict[str, Any] = dict(adapter.named_children())
    first = next(iter(made.values()))
    A = torch.cat([made[part].linear_in.weight for part in adapter.parts if part in made])
    B = A.new_zeros(adapter.out_features, A.shape[0])
    row = column = 0
    for part, rows in adapter.parts.items():
        if part in made:
            block = made[part].linear_out.weight * (made[part].scale / first.scale)
            B[row : row + rows, column : column + block.shape[1]] = block
            column += block.shape[1]
        row += rows
    return Factors(A, B, first.scale, getattr(first.dropout, "p", 0.0), first.dropout_position)


def ranks_of(adapter: Any) -> dict[str, int]:
    """The rank of each part of a canonical adapter that has one, in order; empty for any other adapter."""
    if not isinstance(adapter, CanonicalAdapter):
        return {}
    return {part: adapter._modules[part].dim for part in adapter.parts if part in adapter._modules}  # type: ignore
