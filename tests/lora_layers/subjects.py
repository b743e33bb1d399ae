"""What the tests of our own layers share: random adapters in float64, and a look at which ops a graph is made of."""

from __future__ import annotations

import functools
import re
import warnings
from collections import Counter
from typing import Any

import torch
from torch.func import functional_call, grad, vmap

from opake.checking.tiny import tiny_batch, tiny_model
from opake.errors import GenericFamilyWarning
from opake.patches import PatchReport, apply_model_patches

BATCH = tiny_batch(rows=3)


def randomised(model: Any, seed: int = 7) -> Any:
    """Every adapter away from its initial zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "adapter." in name or "lora_" in name or name.startswith("linear_"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


@functools.cache
def double_experts() -> str:
    """Experts for float64, which the grouped product of torch does not know; the batched ones of an older Transformers
    write into what the backward of a router needs."""
    model = tiny_model("mixtral").double()
    model.set_experts_implementation("batched_mm")
    try:
        model(**BATCH).loss.backward()
    except RuntimeError:
        return "eager"
    return "batched_mm"


def double_model(model_type: str, **config: Any) -> Any:
    model = tiny_model(model_type, **config).double()
    if hasattr(model, "set_experts_implementation"):
        # dense models have none to set
        experts = any("experts" in name for name, _ in model.named_modules())
        if experts:
            model.set_experts_implementation(double_experts())
    return model


def patch(model: Any, **flags: Any) -> PatchReport:
    """`apply_model_patches` without the loss-only head, which computes the loss in float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GenericFamilyWarning)
        return apply_model_patches(model, **{"fused_linear_cross_entropy": False, **flags})


def trainable(model: Any) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def gradients(model: Any, **batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a batch and the gradient of every trainable parameter."""
    loss = model(**(batch or BATCH)).loss
    params = trainable(model)
    found = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    return loss, {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(params.items(), found, strict=True)}


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


def loop_and_vmap(
    module: torch.nn.Module, rows: torch.Tensor, **vmap_options: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Per-example gradients of `sum(sin(output))` for rows (B, ...): by a loop of ordinary autograd, and by vmap."""
    params = trainable(module)

    def loss(given: Any, row: torch.Tensor) -> torch.Tensor:
        out = functional_call(module, given, (row,))
        outputs = [out] if isinstance(out, torch.Tensor) else [each for each in out if each is not None]
        return sum((each.sin().sum() for each in outputs if each.is_floating_point()), start=rows.new_zeros(()))

    one = [torch.autograd.grad(loss(params, row), list(params.values())) for row in rows]
    loop = {name: torch.stack([grads[i] for grads in one]) for i, name in enumerate(params)}
    detached = {name: p.detach() for name, p in params.items()}
    return loop, vmap(grad(loss), in_dims=(None, 0), **vmap_options)(detached, rows)


def checkpointing(model: Any, **options: Any) -> None:
    """Gradient checkpointing by the name that the installed Transformers has for it."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options or None)
