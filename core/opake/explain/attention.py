"""Attention without numbers: the tensors that a fused kernel keeps, and its operations, for a count on the meta device.

Transformers' own attention falls apart into products of T x T scores there, which no fused kernel keeps.
"""

# ruff: noqa: TID253
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from opake import hf
from opake.batching import padding_check

NAME = "opake_outline"
# backward multiplies five times where forward does twice, and a causal mask spares half
FORWARD_AND_BACKWARD = (2 + 5) * 2 / 2


class Fused(torch.autograd.Function):
    """Keeps queries, keys, values, the output and a number a row; the output has no values."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(torch.empty_like(t) for t in ctx.saved_tensors[:3])


@contextlib.contextmanager
def outlined(model: Any) -> Iterator[list[float]]:
    """The model with such attention, where it can be selected; yields the list that its operations are added to."""
    counted: list[float] = []

    def attention(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **options: Any) -> Any:
        B, N, T, D = q.shape
        counted.append(FORWARD_AND_BACKWARD * B * N * T * k.shape[2] * (D + v.shape[-1]) / 2)
        return Fused.apply(q, k, v).transpose(1, 2), None

    checks = [module for module in model.modules() if padding_check.has_check(module)]
    for module in checks:
        # it reads values, to warn about padding
        vars(module)[padding_check.NAME] = lambda *_, **__: None
    try:
        with _selected(model, attention):
            yield counted
    finally:
        for module in checks:
            del vars(module)[padding_check.NAME]


@contextlib.contextmanager
def _selected(model: Any, attention: Any) -> Iterator[None]:
    if not hf.selects_attention(model):
        yield
        return
    before = [(config, config._attn_implementation) for config in hf.configs(model.config)]
    hf.attention_functions()[NAME] = attention
    try:
        for config, _ in before:
            config._attn_implementation_internal = NAME
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name
        del hf.attention_functions()[NAME]
