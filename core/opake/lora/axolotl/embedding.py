"""PEFT's LoRA embedding with the low-rank term added by the product itself, and the base embedding's own scale kept.

The base embedding is called as the module that it is: Gemma's multiplies by a scale, which the low-rank term gets as
well. The scaling happens on rank columns, not on hidden ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from opake.patching.instance import untouched, wrap_method
from opake.patching.notes import note
from opake.patching.undo import Skip, Undo


def fits(module: Any) -> Skip | None:
    if not untouched(module, "forward"):
        return Skip("its forward was replaced by somebody else")
    base = module.get_base_layer()
    if getattr(base, "max_norm", None) is not None or getattr(base, "sparse", False):
        return Skip(f"{type(base).__name__} renormalises its rows or has sparse gradients")
    variant = next(iter(getattr(module, "lora_variant", {}).values()), None)
    return None if variant is None else Skip(f"the adapter is a {type(variant).__name__}")


def apply(module: nn.Module) -> Undo:
    return Undo([wrap_method(module, "forward", _forward)])


def _forward(inner: Callable[..., Any], self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    reason = "it is called with more than ids" if args or kwargs else _reason(self)
    if reason is not None or torch.compiler.is_compiling():
        note(self, reason or "torch.compile traces PEFT's own code")
        return inner(self, x, *args, **kwargs)
    (name,) = [name for name in self.active_adapters if name in self.lora_embedding_A]
    base, A, B = self.base_layer(x), self.lora_embedding_A[name], self.lora_embedding_B[name]
    if base.dtype != A.dtype or base.dtype != B.dtype:
        note(self, "the adapter has another dtype than the embedding")
        return inner(self, x)
    layer = self.get_base_layer()
    rows = functional.embedding(
        x, A.mT, padding_idx=layer.padding_idx, scale_grad_by_freq=getattr(layer, "scale_grad_by_freq", False)
    )
    scale = self._get_embed_scale()
    rows = rows * self.scaling[name] if scale is None else rows * (scale.to(rows.dtype) * self.scaling[name])
    out = torch.addmm(base.reshape(-1, base.shape[-1]), rows.reshape(-1, rows.shape[-1]), B.mT)
    return out.view(base.shape)


def _reason(module: Any) -> str | None:
    """Why only PEFT can compute this call."""
    if module.disable_adapters:
        return "adapters are disabled"
    if module.merged:
        return "adapters are merged"
    active = [name for name in module.active_adapters if name in module.lora_embedding_A]
    if len(active) != 1:
        return "several adapters are active" if active else "no adapter is active"
    if active[0] in getattr(module, "lora_variant", {}):
        return f"the adapter is a {type(module.lora_variant[active[0]]).__name__}"
    if getattr(module, "input_fns", None) or getattr(module, "output_fns", None):
        return "the embedding is split between devices"
    return None
