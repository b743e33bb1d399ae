"""The router's load-balancing loss under transforms: experts are counted by comparison instead of a scatter.

Stock scatters ones into a tensor of zeros, which inside `vmap` belongs to no row; the numbers are the same. The loss of
a row is that of the row alone. Source of the loss: Switch Transformers, arXiv:2101.03961, equations 4 to 6.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from opake import hf
from opake.patching.replace import globals_read, overlay, readers
from opake.patching.undo import Skip, Undo
from opake.transforms import inside_transform

NAME = "load_balancing_loss_func"
# the loss of Switch Transformers as Mixtral wrote it; other losses of that name take other arguments
ARGUMENTS = ("gate_logits", "num_experts", "top_k", "attention_mask")


def sites(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules whose forward calls the loss, patched ones too."""
    yield from readers(model, lambda value: _is_stock(value) or _is_ours(value))


def fits(record: object, module: nn.Module) -> Skip | None:
    if globals_read(module, _is_stock):
        return None
    if globals_read(module, _is_ours):
        return Skip("the core has replaced it", "already")
    return Skip(f"{type(module).__name__}.forward has no auxiliary loss of the usual kind", "stock")


def apply(record: object, module: nn.Module) -> Undo:
    read = globals_read(module, _is_stock)
    return overlay(module, {name: functools.partial(load_balancing_loss, stock) for name, stock in read.items()})


def load_balancing_loss(
    stock: Callable[..., Any],
    gate_logits: Sequence[torch.Tensor] | None,
    num_experts: int | None = None,
    top_k: int = 2,
    attention_mask: torch.Tensor | None = None,
) -> Any:
    """Auxiliary loss, an fp32 scalar; gate_logits: (B * T, E) for each layer; attention_mask: (B, T).

    Outside transforms, and without logits, the answer is that of `stock`.
    """
    if not inside_transform() or not isinstance(gate_logits, tuple):
        return stock(gate_logits, num_experts, top_k, attention_mask)
    device = gate_logits[0].device
    weights = torch.cat([torch.softmax(logits.to(device), dim=-1) for logits in gate_logits])
    E = weights.shape[-1] if num_experts is None else num_experts
    chosen = torch.topk(weights, top_k, dim=-1).indices
    counted = (chosen[..., None] == torch.arange(E, device=device)).sum(-2).float()
    if attention_mask is None:
        share, probability = counted.mean(0), weights.float().mean(0)
    else:
        real = attention_mask.reshape(-1, 1).to(device, torch.float32).repeat(len(gate_logits), 1)
        share, probability = ((values * real).sum(0) / real.sum() for values in (counted, weights.float()))
    return (share * probability).sum() * E


def _is_stock(value: Any) -> bool:
    if not callable(value) or getattr(value, "__name__", "") != NAME:
        return False
    return hf.arguments(value) == ARGUMENTS


def _is_ours(value: Any) -> bool:
    return getattr(value, "func", None) is load_balancing_loss
