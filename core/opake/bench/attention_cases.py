"""Cases of attention: what flash serves, and what only our own kernel does.

Attention is bound by products and not by memory: GB/s counts inputs, output and gradients once, and says little.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import opake_kernels as K
from opake_kernels.attention import attention_reference

from .cases import Case, Op, case

__all__ = ["attention", "attention_softcap", "attention_wide", "attention_window"]


def _heads(B: int, N: int, K_: int, T: int, D: int) -> Callable[[bool], tuple[Any, ...]]:
    def arguments(small: bool) -> tuple[Any, ...]:
        tokens = 16 if small else T
        return tuple(
            torch.randn(B, 1, tokens, n, D, device="cuda", dtype=torch.bfloat16).transpose(2, 3) for n in (N, K_, K_)
        )

    return arguments


def _flat(op: Callable[..., torch.Tensor], **options: Any) -> Op:
    """The op on (..., heads, T, D), whether or not there is an example axis in front of the batch."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        lead = q.shape[:-3]
        return op(*(t.flatten(0, -4) for t in (q, k, v)), **options).unflatten(0, lead)

    return run


def _case(name: str, shape: tuple[int, int, int, int, int], reference: Op, **options: Any) -> Case:
    B, N, K_, T, D = shape
    # queries, keys, values and output, and the gradients of all of them
    nbytes = 2 * B * T * D * (2 * N + 2 * K_) * 2
    size = f"{B} x {N}/{K_} x {T} x {D}"
    ours = _flat(K.opake_attention, causal=True, **options)
    return Case(name, size, _heads(*shape), (0, 1, 2), (0, 0, 0), nbytes, reference, ours)


@case
def attention() -> Case:
    sdpa = _flat(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    return _case("attention", (16, 14, 2, 1024, 64), sdpa)


@case
def attention_wide() -> Case:
    sdpa = _flat(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    return _case("attention_wide", (8, 32, 8, 1024, 128), sdpa)


@case
def attention_window() -> Case:
    return _case("attention_window", (8, 32, 8, 2048, 128), _flat(_masked, window=512), window=512)


@case
def attention_softcap() -> Case:
    plain = _flat(attention_reference, causal=True, softcap=50.0)
    return _case("attention_softcap", (4, 8, 4, 2048, 256), plain, softcap=50.0)


def _masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen & ~seen.tril(-window), enable_gqa=True)
