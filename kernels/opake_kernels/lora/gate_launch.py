"""Launches of the gated activation with its low-rank terms (gate_kernels.py), and the tiles they take.

Leaves out every check, and ranks above `MAX_RANK`, whose sums do not fit in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from opake_kernels.activations import Activation, kernel_kind
from opake_kernels.launch import INTERPRET, cdiv, launch, next_power_of_2

from .gate_kernels import gate_backward_kernel, gate_forward_kernel

__all__ = ["MAX_RANK", "gate_backward", "gate_forward"]

MAX_RANK = 64
# rows of a group that one program takes at most, forward and backward, and programs that keep the device busy
SHORT, CHUNK, PROGRAMS = 128, 1024, 512
# rows and columns of a tile, and warps: measured on an H200 within 6 % of a copy's bandwidth forward, 34 % backward
BR, BC, WARPS = 16, 64, 4

Weight = torch.Tensor | None


def gate_forward(
    gate: torch.Tensor, up: torch.Tensor, Z: torch.Tensor, factors: Sequence[Weight], groups: int, act: Activation
) -> torch.Tensor:
    """act(gate + Zg Bg) * (up + Zu Bu), (N, I).

    gate, up: (N, I); Z: (N, rg + ru), all contiguous. factors: Bg and Bu, (r, I) or (groups, r, I), None for rank 0.
    """
    h = torch.empty_like(gate)
    ranks, given, steps = _factors(factors, gate)
    R, C, NB, NC, size = sizes = _sizes(gate, groups, SHORT)
    launch(
        gate_forward_kernel, (groups * NC * NB,), gate, gate, up, h, Z, *given, *sizes, Z.stride(0), *steps, *ranks,
        act.alpha, act.limit, act.offset, **_constants(gate, act, ranks, "GU"), WHOLE=_whole(R, C, size),
    )  # fmt: skip
    return h


def gate_backward(
    D: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    Z: torch.Tensor,
    K: torch.Tensor,
    factors: Sequence[Weight],
    groups: int,
    act: Activation,
) -> tuple[torch.Tensor, list[Weight]]:
    """The gradient of up, and the sums dgate^T Zg, dup^T Zu, h^T K of each group, (G, I, r) in fp32; None for rank 0.

    D: (N, I), the gradient of the activation less K A^T; the gradient of gate takes its place. gate, up and Z as in
    `gate_forward`. K: (N, rd), contiguous. factors: Bg, Bu and A^T of the down projection.
    """
    DU = torch.empty_like(D)
    ranks, given, steps = _factors(factors, D)
    R, C, NB, NC, size = sizes = _sizes(D, groups, CHUNK)
    sums = [torch.empty(groups * NC, C, r, dtype=torch.float32, device=D.device) if r else None for r in ranks]
    launch(
        gate_backward_kernel, (groups * NC * NB,), D, D, gate, up, DU, Z, K, *given,
        *(D if s is None else s for s in sums), *sizes, Z.stride(0), K.stride(0), *steps, *ranks,
        act.alpha, act.limit, act.within, act.offset, **_constants(D, act, ranks, "GUD"), WHOLE=_whole(R, C, size),
    )  # fmt: skip
    if NC == 1:
        return DU, sums
    return DU, [None if s is None else s.view(groups, NC, *s.shape[1:]).sum(1) for s in sums]


def _factors(factors: Sequence[Weight], like: torch.Tensor) -> tuple[list[int], list[torch.Tensor], list[int]]:
    """(ranks, tensors to hand to a kernel, steps by group, rank and column of each)."""
    ranks = [0 if f is None else f.shape[-2] for f in factors]
    steps: list[int] = []
    for f in factors:
        steps += (0, 0, 0) if f is None else (0, *f.stride()) if f.dim() == 2 else f.stride()
    return ranks, [like if f is None else f for f in factors], steps


def _constants(x: torch.Tensor, act: Activation, ranks: Sequence[int], names: str) -> dict[str, Any]:
    return {
        **{f"R{name}": max(16, next_power_of_2(r)) if r else 0 for name, r in zip(names, ranks, strict=True)},
        "KIND": kernel_kind(act, x.dtype),
        "CLAMP": bool(act.limit),
        # the interpreter multiplies half-precision tiles by their bits
        "WIDEN": INTERPRET and x.dtype != torch.float32,
        # tiles on their way keep a multiprocessor fed where twelve warps of it fit beside them; fp32 has no room
        "STAGES": 3 if x.dtype.itemsize == 2 else 1,
        "BR": BR,
        "BC": BC,
        "num_warps": WARPS,
    }


def _sizes(x: torch.Tensor, groups: int, size: int) -> tuple[int, int, int, int, int]:
    """(rows of a group, columns, strips, chunks of a group, rows of a chunk) of x (N, columns).

    A chunk has `size` rows, or fewer where that leaves the device with too few programs.
    """
    N, C = x.shape
    R, NB = N // groups if groups else 0, cdiv(C, BC)
    while size > 64 and groups * cdiv(R, size) * NB < PROGRAMS:
        size //= 2
    return R, C, NB, max(1, cdiv(R, size)), size


def _whole(R: int, C: int, size: int) -> bool:
    """Whether no tile hangs over an edge."""
    return C % BC == 0 and R % BR == 0 and size % BR == 0
