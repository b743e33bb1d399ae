"""Tiny PEFT models in float64, where fused and unfused differ by rounding alone, and what their graphs are made of."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from opake.checking.tiny import tiny_batch, tiny_model
from opake.patches import PatchReport, apply_model_patches

BATCH = tiny_batch(rows=3)
EVERYTHING = {"qkv": 2, "mlp": 2, "w": 2}


def with_lora(model: Any, name: str = "default", **options: Any) -> Any:
    """`model` in PEFT, every adapter away from its initial zero, in the dtype of the model."""
    settings = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    with warnings.catch_warnings():
        # PEFT on what it does to fan_in_fan_out, on merging a lora_bias, on patterns that it makes itself
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False", UserWarning)
        warnings.filterwarnings("ignore", "`lora_bias=True` was passed", UserWarning)
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
        found = get_peft_model(model, LoraConfig(**settings), adapter_name=name)
    return randomised(found.to(next(model.parameters()).dtype))


def randomised(model: Any) -> Any:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name or "lora_B" in name or "lora_embedding" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def peft_model(model_type: str = "llama", base: dict[str, Any] | None = None, **options: Any) -> Any:
    """A PEFT model around `tiny_model`; `base` overrides its config, `options` the LoraConfig."""
    return with_lora(tiny_model(model_type, **(base or {})), **options).double()


def patch(model: Any, **flags: Any) -> PatchReport:
    """`apply_model_patches` without the loss-only head, which computes the loss in float32."""
    return apply_model_patches(model, **{"fused_linear_cross_entropy": False, **flags})


def fused(loss: torch.Tensor) -> dict[str, int]:
    """How many projections, QKV triples and MLPs of the graph of `loss` went through a fused op."""
    seen, waiting, found = set(), [loss.grad_fn], Counter()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if match := re.fullmatch(r"opake_lora_(\w+?)Backward\d*", node.name()):
            found[match[1]] += 1
        waiting += [child for child, _ in node.next_functions]
    return dict(found)


def trainable(model: Any) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def gradients(model: Any, **batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a batch and the gradient of every trainable parameter."""
    loss = model(**(batch or BATCH)).loss
    params = trainable(model)
    if not params or not loss.requires_grad:
        return loss, {}
    found = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    return loss, {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(params.items(), found, strict=True)}
