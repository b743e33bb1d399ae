"""Which of the three paths serves a call, and why: from shapes, dtypes and hardware alone, never from what is routed.

Thresholds are those that `docs/benchmarks/moe.md` measures.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from opake_kernels.launch import HAS_TRITON, INTERPRET

from .grouped import alignment

__all__ = ["MANY", "NAMES_OF_PATHS", "Choice", "choose"]

NAMES_OF_PATHS = {"dense": "Opake_MoE", "grouped": "Opake_GroupedMoE", "fused": "Opake_FusedMoE"}
# experts from which `grouped_mm` is worth its sorting on a device other than CPU
MANY = 16
_HALF = (torch.float16, torch.bfloat16)


class Choice(NamedTuple):
    """path: a key of NAMES_OF_PATHS; why: in words, for reports."""

    path: str
    why: str


def choose(device: torch.device, dtype: torch.dtype, E: int, K: int, I: int, H: int, *, grouped: bool = True) -> Choice:
    """The path of a call with E experts (hidden size H, intermediate size I) of which each token takes K."""
    if not grouped:
        return Choice("dense", "grouped=False")
    if K >= E and device.type != "cpu":
        return Choice("dense", f"each token takes all {E} experts")
    if HAS_TRITON and ((device.type == "cuda" and dtype in _HALF) or (INTERPRET and dtype != torch.float64)):
        return Choice("fused", f"Triton, {_short(dtype)} on {device.type}")
    if not hasattr(functional, "grouped_mm") or device.type not in ("cpu", "cuda"):
        return Choice("dense", f"no grouped_mm on {device.type}")
    if dtype == torch.float64 or (device.type == "cuda" and dtype != torch.bfloat16):
        return Choice("dense", f"no grouped_mm in {_short(dtype)} on {device.type}")
    step = alignment(dtype)
    if I % step or H % step:
        return Choice("dense", f"grouped_mm in {_short(dtype)} takes sizes in multiples of {step}, not {H} and {I}")
    if device.type != "cpu" and E < MANY:
        return Choice("dense", f"{E} experts, fewer than {MANY}")
    return Choice("grouped", f"grouped_mm, {_short(dtype)} on {device.type}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
