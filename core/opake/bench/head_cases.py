"""The cases of linear cross-entropy, frozen head; see cases.py for what a case is.

What bounds it is not bytes but two matrix products, so the column of bandwidth says little here: hold the time against
4 x tokens x hidden x vocabulary operations. Leaves out correctness, which is the tests' business.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

import opake_kernels as K

from .cases import Case, Op, case, randn

__all__ = ["linear_cross_entropy", "linear_cross_entropy_narrow"]


def _frozen_head(op: str, T: int, H: int, V: int) -> Case:
    def arguments(small: bool) -> tuple[Any, ...]:
        T_, H_, V_ = (4, 64, 128) if small else (T, H, V)
        labels = torch.randint(0, V_, (8, T_), device="cuda")
        labels[:, ::7] = -100
        return randn(8, T_, H_), randn(V_, H_) / H_**0.5, labels

    def reference(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy((hidden @ weight.t()).float().view(-1, weight.shape[0]), labels.view(-1))

    def liger() -> Op:
        from liger_kernel.ops.fused_linear_cross_entropy import (  # pyright: ignore[reportMissingImports]
            LigerFusedLinearCrossEntropyFunction as L,
        )

        return lambda x, w, y: L.apply(x.view(-1, x.shape[-1]), w, y.view(-1))[0]

    # the weight once for each product, the hidden states and their gradient
    nbytes = 2 * (2 * V * H + 2 * 8 * T * H)
    size, ours = f"{8 * T} x {H} x {V}", K.opake_linear_cross_entropy_loss
    return Case(op, size, arguments, (0,), (0, None, 0), nbytes, reference, ours, liger)


@case
def linear_cross_entropy() -> Case:
    return _frozen_head("linear_cross_entropy", 1024, 4096, 128256)


@case
def linear_cross_entropy_narrow() -> Case:
    """The head of Qwen2-0.5B: little to compute for each logit."""
    return _frozen_head("linear_cross_entropy_narrow", 2048, 896, 151936)
