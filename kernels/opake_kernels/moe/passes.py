"""Forward and backward of sparse experts, step by step, over the products that a path offers (grouped.py, fused.py).

Kept for backward are the inputs alone, and on a CPU gate and up; elsewhere they are computed again. Only what is asked
for is computed: frozen experts cost no weight gradient, and each gradient of a weight is one of each example,
(G, E, ...).

Notation: x, d (N, H), rows of all tokens; slots (N * K), a token's choices; z = scaling * x A, the narrow side of an
adapter. With w_s the routing weight of slot s, y_s = w_s (h_s down + bias) and h = act(gate) * up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .weights import NAMES

__all__ = ["backward", "forward", "routing_gradient_of_bias"]


def forward(x: torch.Tensor, weight: torch.Tensor, path: Any) -> torch.Tensor:
    """(N, H); weight (N * K)."""
    w = path.w
    h = path.hidden(x, path.low_rank(x, w.A, w.scalings[0], True))
    z = path.low_rank(h, w.A_down, w.scalings[1], False)
    low_rank = None if z is None else (z, w.B_down)
    y = path.rows(h, w.down.mT, low_rank=low_rank, bias=w.down_bias, weight=weight, scatter=True)
    return path.combine(y).to(x.dtype)


def backward(
    d: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, path: Any, need: Sequence[bool], dtypes: Sequence[Any]
) -> list[torch.Tensor | None]:
    """Gradients of x (N, H), of the routing weights (N * K), then of the weights in the order of NAMES.

    need: for each of those. dtypes: of the weights as they were given.
    """
    w = path.w
    wants: dict[str, bool] = dict(zip(NAMES, need[2:], strict=True))
    kinds: dict[str, Any] = dict(zip(NAMES, dtypes, strict=True))
    need_hidden = wants["down"] or wants["A_down"] or wants["B_down"]
    z = path.low_rank(x, w.A, w.scalings[0], True)
    z_down = None if w.B_down is None else path.low_rank(d, w.B_down.mT, w.scalings[1], True)
    dgu, hidden, d_weight = path.gate_gradients(x, d, weight, z, z_down, need_hidden)
    dz = None if w.B is None else path.low_rank(dgu, w.B.mT, w.scalings[0], False)
    dx = None
    if need[0]:
        low_rank = None if dz is None else (dz, w.A.mT)
        dx = path.combine(path.rows(dgu, w.gate_up, low_rank=low_rank, scatter=True))
    found: dict[str, torch.Tensor] = {}
    for name, products in _weight_gradients(path, x, d, weight, dgu, hidden, z, dz, z_down).items():
        if wants[name]:
            found[name] = products(kinds[name])
    return [dx, d_weight if need[1] else None, *[found.get(name) for name in NAMES]]


def _weight_gradients(
    path: Any, x: Any, d: Any, weight: Any, dgu: Any, hidden: Any, z: Any, dz: Any, z_down: Any
) -> dict[str, Any]:
    """For each weight, what computes its gradient in a dtype."""
    w, segments = path.w, path.segments

    def sums(rows: torch.Tensor, dtype: torch.dtype, **more: Any) -> torch.Tensor:
        return segments(rows, rows.new_ones(path.S, 1), dtype, **more).squeeze(-1)

    def narrow_down() -> torch.Tensor:
        return path.low_rank(hidden, w.A_down, w.scalings[1], False)

    return {
        "gate_up": lambda dtype: segments(dgu, x, dtype, gather_q=True),
        "down": lambda dtype: segments(d, hidden, dtype, weight=weight, gather_p=True),
        "gate_up_bias": lambda dtype: sums(dgu, dtype),
        "down_bias": lambda dtype: sums(d, dtype, weight=weight, gather_p=True),
        "A": lambda dtype: segments(x, dz, dtype, gather_p=True),
        "B": lambda dtype: segments(z, dgu, dtype),
        "A_down": lambda dtype: segments(hidden, z_down, dtype, weight=weight),
        "B_down": lambda dtype: segments(narrow_down(), d, dtype, weight=weight, gather_q=True),
    }


def routing_gradient_of_bias(d: torch.Tensor, bias: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """What a bias of the down projection adds to the gradient of the routing weights: d (N, H), index (N, K)."""
    return (d.float() @ bias.float().mT if d.dtype.itemsize == 2 else d @ bias.mT).gather(1, index.long())
