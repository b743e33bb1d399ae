"""The cases of the LoRA ops, and the matrix products that are their floor; see cases.py for what a case is.

Sizes are those of Llama-3-8B at 8 x 512 tokens and of Qwen2-0.5B at 16 x 1024, rank 16, adapters in fp32 as PEFT keeps
them. The floor is the frozen products alone, forward and backward, with nothing between them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

import opake_kernels as K
from opake_kernels.lora import lora_mlp_reference, lora_qkv_reference

from .cases import Case, Op, case, randn

__all__ = ["lora_mlp_8b", "lora_mlp_half_b", "lora_qkv_8b", "lora_qkv_half_b"]

RANK, SCALE = 16, 2.0


def _adapter(n_in: int, n_out: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A (in, rank) and B (rank, out), transposes of contiguous fp32 weights."""
    down, up = torch.randn(RANK, n_in, device="cuda"), torch.randn(n_out, RANK, device="cuda")
    return (down * 0.02).mT, (up * 0.02).mT


def _three(op: Op) -> Op:
    """`op` of three projections as a function of X and of W, A, B of each."""

    def call(X: torch.Tensor, *rest: torch.Tensor) -> Any:
        return op(X, *[value for j in (0, 3, 6) for value in (*rest[j : j + 3], SCALE)])

    return call


def _case(op: str, sizes: tuple[int, ...], rows: tuple[int, int], ours: Op, twin: Op) -> Case:
    """`sizes`: hidden, then the widths of q, k, v; or hidden and intermediate."""

    def arguments(small: bool) -> tuple[Any, ...]:
        (B, T), (H, *widths) = ((4, 2), [32] * len(sizes)) if small else (rows, sizes)
        shapes = [(H, O) for O in widths] if len(widths) == 3 else [(H, widths[0]), (H, widths[0]), (widths[0], H)]
        weights = [t for n_in, n_out in shapes for t in (randn(n_out, n_in) * 0.02, *_adapter(n_in, n_out))]
        return randn(B, T, H), *weights

    adapters = (2, 3, 5, 6, 8, 9)
    N = rows[0] * rows[1]
    # forward and backward read the rows and the base weights once each, and write as many
    nbytes = 4 * (N * sum(sizes) + sizes[0] * sum(sizes[1:])) * 2
    size = f"{' / '.join(map(str, sizes))}, {rows[0]} x {rows[1]}, r {RANK}"
    return Case(
        op, size, arguments, (0, *adapters), (0, *[None] * 9), nbytes, _three(twin), _three(ours), grouped=adapters
    )


class _Products(torch.autograd.Function):
    """Each of the frozen products of a call once forward and once backward; no activation, no adapter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> Any:
        ctx.save_for_backward(*weights)
        if weights[0].shape[1] != weights[-1].shape[1]:
            gate, up, down = weights
            return F.linear(F.linear(x, gate), down), F.linear(x, up)
        return tuple(F.linear(x, w) for w in weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        weights = ctx.saved_tensors
        rows = [g.reshape(-1, g.shape[-1]) for g in grads]
        if weights[0].shape[1] != weights[-1].shape[1]:
            gate, up, down = weights
            dx = ((rows[0] @ down) @ gate).addmm_(rows[1], up)
        else:
            dx = rows[0] @ weights[0]
            for g, w in zip(rows[1:], weights[1:], strict=True):
                dx.addmm_(g, w)
        return dx.view(*grads[0].shape[:-1], dx.shape[-1]), *[None] * len(weights)


def _floor(of: Case) -> Case:
    """The products of `of` alone, as an op of its own."""

    def arguments(small: bool) -> tuple[Any, ...]:
        full = of.arguments(small)
        return full[0], *full[1::3]

    op: Op = _Products.apply
    return Case(f"{of.op}_floor", of.size, arguments, (0,), (0, None, None, None), of.nbytes, op, op, maps=False)


@case
def lora_mlp_8b() -> Case:
    return _case("lora_mlp", (4096, 14336), (8, 512), K.opake_lora_mlp, lora_mlp_reference)


@case
def lora_mlp_8b_floor() -> Case:
    return _floor(lora_mlp_8b())


@case
def lora_mlp_half_b() -> Case:
    return _case("lora_mlp", (896, 4864), (16, 1024), K.opake_lora_mlp, lora_mlp_reference)


@case
def lora_mlp_half_b_floor() -> Case:
    return _floor(lora_mlp_half_b())


@case
def lora_qkv_8b() -> Case:
    return _case("lora_qkv", (4096, 4096, 1024, 1024), (8, 512), K.opake_lora_qkv, lora_qkv_reference)


@case
def lora_qkv_8b_floor() -> Case:
    return _floor(lora_qkv_8b())


@case
def lora_qkv_half_b() -> Case:
    return _case("lora_qkv", (896, 896, 128, 128), (16, 1024), K.opake_lora_qkv, lora_qkv_reference)


@case
def lora_qkv_half_b_floor() -> Case:
    return _floor(lora_qkv_half_b())
