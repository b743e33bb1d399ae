"""The dense path: every expert computes every token, and what was not chosen counts zero. Right on any device.

Costs E / K times the products of the others and needs no sorting. One expert at a time, so that no more than its
activations is ever held. Backward computes them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opake_kernels.activations import Activation
from opake_kernels.gated import gated_reference
from opake_kernels.lora.gate import activated_backward

from .weights import NAMES, Weights

__all__ = ["backward", "forward"]

Optional = torch.Tensor | None


def forward(
    x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor, w: Weights, act: Activation, paired: bool
) -> torch.Tensor:
    """x (G, T, H), index and weight (G, T, K) -> (G, T, H)."""
    wide = _wide(x, weight)
    y = torch.zeros(x.shape, dtype=wide, device=x.device)
    for e in range(_count(w, x)):
        one = _expert(w, e, x)
        hidden = gated_reference(one.gate_and_up(_own(x, index, e))[1], None, act, paired)
        y += one.out(hidden) * _share(index, weight, e, wide)
    return y.to(x.dtype)


def backward(
    d: torch.Tensor,
    x: torch.Tensor,
    index: torch.Tensor,
    weight: torch.Tensor,
    w: Weights,
    act: Activation,
    paired: bool,
    need: Sequence[bool],
    dtypes: Sequence[torch.dtype | None],
) -> list[Optional]:
    """Gradients of x, of the routing weights and of each weight (G, E, ...), in the order of NAMES."""
    wide = _wide(x, weight)
    dx = torch.zeros(x.shape, dtype=wide, device=x.device)
    dw = torch.zeros(weight.shape, dtype=wide, device=x.device)
    kinds = {name: dtype for name, dtype, wanted in zip(NAMES, dtypes, need[2:], strict=True) if wanted}
    found = {name: _room(name, w, x, dtype) for name, dtype in kinds.items()}

    # a function, so that nothing of one expert is held while the next is computed
    def add(e: int) -> None:
        share = _share(index, weight, e, wide)
        mine = _own(d, index, e), _own(x, index, e)
        part, inner, products = _expert_backward(_expert(w, e, x), *mine, share, act, paired)
        dx.add_(part)
        dw.add_(inner[..., None] * (index == e))
        for name, place in found.items():
            place[:, e] = products[name]()

    for e in range(_count(w, x)):
        add(e)
    grads = [found.get(name) for name in NAMES]
    return [dx.to(x.dtype) if need[0] else None, dw.to(weight.dtype) if need[1] else None, *grads]


def _room(name: str, w: Weights, x: torch.Tensor, dtype: Any) -> torch.Tensor:
    """(G, E, ...) for the gradients of a weight, written one expert after another."""
    tail = getattr(w, name).shape[1:]
    return torch.empty(x.shape[0], _count(w, x), *tail, dtype=dtype, device=x.device)


@dataclass(slots=True)
class _Expert:
    """One expert, of all examples or of each (a leading G); biases broadcast over tokens. Names as in `Weights`."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: Optional
    down_bias: Optional
    A: Any
    B: Any
    A_down: Any
    B_down: Any
    scalings: tuple[float, float]

    def gate_and_up(self, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """(the narrow side of the adapter, gate and up)."""
        z, both = _affine(x, self.gate_up.mT, self.A, self.B, self.scalings[0])
        return z, both if self.gate_up_bias is None else both + self.gate_up_bias

    def out(self, hidden: torch.Tensor) -> torch.Tensor:
        y = _affine(hidden, self.down.mT, self.A_down, self.B_down, self.scalings[1])[1]
        return y if self.down_bias is None else y + self.down_bias


def _expert_backward(
    one: _Expert, d: torch.Tensor, x: torch.Tensor, share: torch.Tensor, act: Activation, paired: bool
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Callable[[], torch.Tensor]]]:
    """(its part of dx, d . y for each token, what computes the gradient of each of its weights)."""
    z, both = one.gate_and_up(x)
    gate, up = (both[..., ::2], both[..., 1::2]) if paired else both.chunk(2, dim=-1)
    z_down, dh = _affine(d, one.down, _turned(one.B_down), _turned(one.A_down), one.scalings[1])
    hidden, dg, du = activated_backward((dh * share).to(dh.dtype), gate.contiguous(), up.contiguous(), act)
    inner = (dh * hidden).sum(-1, dtype=share.dtype)
    if one.down_bias is not None:
        inner = inner + (d * one.down_bias).sum(-1, dtype=share.dtype)
    dgu = torch.stack((dg, du), dim=-1).flatten(-2) if paired else torch.cat((dg, du), dim=-1)
    dz, dx = _affine(dgu, one.gate_up, _turned(one.B), _turned(one.A), one.scalings[0])
    dy = (d * share).to(d.dtype)
    products: dict[str, Any] = {
        "gate_up": lambda: dgu.mT @ x,
        "down": lambda: dy.mT @ hidden,
        "gate_up_bias": lambda: dgu.sum(1),
        "down_bias": lambda: dy.sum(1),
        "A": lambda: x.mT @ dz,
        "B": lambda: z.mT @ dgu,
        "A_down": lambda: hidden.mT @ (z_down * share).to(d.dtype),
        "B_down": lambda: (hidden @ one.A_down * one.scalings[1]).mT @ dy,
    }
    return dx, inner, products


def _count(w: Weights, x: torch.Tensor) -> int:
    """Experts of one example."""
    E = w.sizes[0]
    return E if w.shared else E // x.shape[0]


def _expert(w: Weights, e: int, x: torch.Tensor) -> _Expert:
    named = {name: _of(getattr(w, name), w.shared, e, x.shape[0]) for name in NAMES}
    return _Expert(**named, scalings=w.scalings)


def _of(stack: Optional, shared: bool, e: int, G: int) -> Any:
    if stack is None or shared:
        return None if stack is None else stack[e]
    each = stack.unflatten(0, (G, -1))[:, e]
    return each[:, None] if each.dim() == 2 else each


def _turned(factor: Optional) -> Optional:
    return None if factor is None else factor.mT


def _affine(x: torch.Tensor, W: torch.Tensor, A: Optional, B: Optional, scaling: float) -> tuple[Any, torch.Tensor]:
    """(z, x W + z B) with z = scaling * x A."""
    if A is None or B is None:
        return None, x @ W
    z = (x @ A) * scaling
    return z, x @ W + z @ B


def _wide(x: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.promote_types(x.dtype, torch.float32))


def _own(rows: torch.Tensor, index: torch.Tensor, e: int) -> torch.Tensor:
    """Rows of the tokens that chose expert `e`, zeros for others: what it would make of them might not be finite."""
    return torch.where((index == e).any(-1, keepdim=True), rows, 0)


def _share(index: torch.Tensor, weight: torch.Tensor, e: int, dtype: torch.dtype) -> torch.Tensor:
    """(G, T, 1): what expert `e` counts for each token; its choices added, should it be chosen twice."""
    return (weight * (index == e)).sum(-1, keepdim=True, dtype=dtype)
