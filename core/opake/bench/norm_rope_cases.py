"""The cases of RMSNorm, add + RMSNorm and RoPE; see cases.py for what a case is.

Sizes are those of an 8B model at 65536 tokens. RoPE is timed in both layouts in which queries arrive: heads outermost
in memory, and tokens outermost, as a projection leaves them. Leaves out correctness, which is the tests' business.
"""

from __future__ import annotations

from typing import Any

import torch

import opake_kernels as K

from .cases import Case, Op, case, randn

__all__ = ["fused_add_rms_norm", "q_norm", "rms_norm", "rope_qk", "rope_qk_by_token"]


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


@case
def rms_norm() -> Case:
    def arguments(small: bool) -> tuple[Any, ...]:
        shape = (8, 4, 64) if small else (8, 8192, 4096)
        return randn(*shape), randn(shape[-1])

    def liger() -> Op:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction as L  # pyright: ignore[reportMissingImports]

        return lambda x, w: L.apply(x, w, 1e-6, 0.0, "llama", True)

    # forward reads one and writes one, backward reads two and writes one
    nbytes = 5 * 65536 * 4096 * 2
    return Case("rms_norm", "65536 x 4096", arguments, (0, 1), (0, None), nbytes, _normed, K.opake_rms_norm, liger, 1)


@case
def q_norm() -> Case:
    def arguments(small: bool) -> tuple[Any, ...]:
        shape = (8, 4, 4, 64) if small else (8, 8192, 32, 128)
        return randn(*shape), randn(shape[-1])

    nbytes = 5 * 65536 * 32 * 128 * 2
    size = "65536 x 32 x 128"
    return Case("q_norm", size, arguments, (0, 1), (0, None), nbytes, _normed, K.opake_rms_norm, grouped=1)


@case
def fused_add_rms_norm() -> Case:
    def arguments(small: bool) -> tuple[Any, ...]:
        shape = (8, 4, 64) if small else (8, 8192, 4096)
        return randn(*shape), randn(*shape), randn(shape[-1])

    def reference(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return _normed(total, weight), total

    def liger() -> Op:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction as L  # pyright: ignore

        return lambda x, r, w: L.apply(x, r, w, 1e-6, 0.0, "llama", True)

    # forward reads two and writes two, backward reads the sum and two gradients and writes one
    nbytes = 8 * 65536 * 4096 * 2
    ours, dims = K.opake_fused_add_rms_norm, (0, 0, None)
    return Case("fused_add_rms_norm", "65536 x 4096", arguments, (0, 1, 2), dims, nbytes, reference, ours, liger, 2)


def _half_turned(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def _stock_rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + _half_turned(q) * sin, k * cos + _half_turned(k) * sin


def _rope(op: str, by_token: bool) -> Case:
    def heads(B: int, N: int, T: int, D: int) -> torch.Tensor:
        return randn(B, 1, T, N, D).transpose(2, 3) if by_token else randn(B, 1, N, T, D)

    def arguments(small: bool) -> tuple[Any, ...]:
        N, K_, T, D = (2, 1, 4, 64) if small else (32, 8, 8192, 128)
        return heads(8, N, T, D), heads(8, K_, T, D), randn(8, 1, T, D), randn(8, 1, T, D)

    def folded(rope: Op) -> Op:
        # an example is a batch of one; the whole batch comes with both dimensions
        return lambda *args: rope(*[a.flatten(0, 1) for a in args]) if args[0].dim() == 5 else rope(*args)

    def liger() -> Op:
        from liger_kernel.ops.rope import LigerRopeFunction as L  # pyright: ignore[reportMissingImports]

        return folded(L.apply)

    # q and k are read and written both ways; the tables are a fortieth of that
    nbytes = 4 * 65536 * 40 * 128 * 2
    size, dims, ours = "65536 x (32 + 8) x 128", (0, 0, 0, 0), folded(K.opake_rope_qk)
    return Case(op, size, arguments, (0, 1), dims, nbytes, folded(_stock_rope), ours, liger)


@case
def rope_qk() -> Case:
    return _rope("rope_qk", by_token=False)


@case
def rope_qk_by_token() -> Case:
    return _rope("rope_qk_by_token", by_token=True)
