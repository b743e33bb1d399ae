"""Eager attention with a soft cap or sinks, by our own kernel where a step computes per-example gradients on CUDA.

No backend of PyTorch has either, so Transformers gives such models (Gemma 2, GPT-OSS) eager attention alone, whose
scores are kept for every pair of tokens. The forward of each attention layer is given our function in the place of the
eager one that it falls back on; name, masks and semantics stay those of eager attention: an additive mask is added as
it is, so a query that may see nothing sees everything. Outside steps, on other devices, and for what the kernel does
not take, the stock function runs. Leaves out eager attention without cap or sinks: that is what the user asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from opake.checkpoint.step import inside_step
from opake.patching.hardware import no_kernels_because
from opake.patching.notes import note
from opake.patching.replace import globals_read, overlay
from opake.patching.undo import Undo
from opake_kernels.attention.math import allowed
from opake_kernels.attention.route import TRITON, Asked, route
from opake_kernels.attention.tiled import tiled_attention
from opake_kernels.checks import autocast_to_compute_dtype

from .windows import attention_layers, hands_on

STOCK = "eager_attention_forward"
PECULIAR = ("softcap", "s_aux")


def serves(model: nn.Module) -> bool:
    """Whether the model has eager attention that hands on a soft cap or sinks, and lies where our kernel runs."""
    parameter = next(model.parameters(), None)
    on_device = parameter is not None and parameter.device.type == "cuda" and no_kernels_because() is None
    return on_device and peculiar(model)


def peculiar(model: nn.Module) -> bool:
    """Whether the model is loaded with eager attention and hands on a soft cap or sinks."""
    eager = getattr(getattr(model, "config", None), "_attn_implementation", None) == "eager"
    return eager and any(hands_on(model, keyword) for keyword in PECULIAR)


def apply(model: nn.Module) -> Undo:
    """Overlay the eager function that every attention layer reads."""
    changes = []
    for layer in attention_layers(model):
        for name, stock in globals_read(layer, _is_stock).items():
            changes.extend(overlay(layer, {name: functools.partial(fused_eager, stock)}).changes)
    return Undo(changes)


def overlaid(model: nn.Module) -> bool:
    """Whether every attention layer of the model has our function, so that causality needs no mask."""
    found = attention_layers(model)
    return bool(found) and all(globals_read(layer, _is_ours) for layer in found)


def fused_eager(
    stock: Callable[..., Any],
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """query (B, N, T, D), key and value (B, K, S, D) -> (B, T, N, D); weights are returned by the stock function alone.

    attention_mask: additive, or None for causal attention over the last `sliding_window` keys.
    """
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if not inside_step() or (softcap is None and sinks is None and attention_mask is not None):
        return stock(module, query, key, value, attention_mask, **kwargs)
    causal, window = attention_mask is None, kwargs.get("sliding_window")
    window = window if causal and window is not None and window < key.shape[2] else None
    dropout = kwargs.get("dropout", 0.0) if module.training else 0.0
    q, k, v = autocast_to_compute_dtype(query, key, value)
    taken, reason = route(q, k, v, Asked(attention_mask, causal, window, softcap, sinks, dropout))
    if taken == TRITON:
        out = tiled_attention(
            q, k, v, mask=attention_mask, sinks=sinks, causal=causal, scale=kwargs.get("scaling"), window=window,
            softcap=softcap,
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), None
    if reason is not None:
        note(module, f"attention by plain operations: {reason}")
    if causal:
        attention_mask = _additive(query, key, window)
    return stock(module, query, key, value, attention_mask, **kwargs)


def _additive(query: torch.Tensor, key: torch.Tensor, window: int | None) -> torch.Tensor:
    """(T, S), the smallest finite number where a query may not look."""
    seen = allowed(query.shape[2], key.shape[2], None, True, window, query.device)
    assert seen is not None, "causal"
    lowest = torch.finfo(query.dtype).min
    return torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill(~seen, lowest)


def _is_stock(value: Any) -> bool:
    return callable(value) and getattr(value, "__name__", "") == STOCK


def _is_ours(value: Any) -> bool:
    return getattr(value, "func", None) is fused_eager
