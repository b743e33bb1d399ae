"""Ways to make one training step of a LoRA model, private or not, each as a function of a model and its rows.

A private way returns the sum of clipped gradients and the norms of the rows; an ordinary one the mean gradient. What a
rival needs is imported when it is asked for, and an ImportError is its reason for not taking part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from opake.functional import clipped_grad

from .memory_model import trainable

__all__ = ["CLIP", "WAYS", "Way"]

Grads = dict[str, torch.Tensor]
Rows = dict[str, torch.Tensor]
# a step: gradients by name, and which engine made them, in words
Step = Callable[[], tuple[Grads, str]]
CLIP = 1.0


@dataclass(frozen=True, slots=True)
class Way:
    """`make(model, rows)` prepares the model and returns its step; `private`: whether rows are clipped one by one."""

    make: Callable[[Any, Rows], Step]
    private: bool
    what: str


def _trainable(model: Any) -> Grads:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _ours(
    model: Any,
    rows: Rows,
    *,
    engine: str = "auto",
    capture: str | bool = "auto",
    remat: str = "",
    **flags: bool,
) -> Step:
    from opake.checkpoint import selective_checkpointing
    from opake.patches import apply_model_patches, apply_runtime_patches

    apply_runtime_patches()
    apply_model_patches(model, **flags)
    if remat:
        selective_checkpointing(model, part=remat)
    run = clipped_grad(model, clip_norm=CLIP, engine=engine, capture=capture)
    params = trainable(model)

    def step() -> tuple[Grads, str]:
        found = run(params, **rows)
        return found.grads, f"{found.engine}; {found.reason.rsplit('; ', 1)[-1]}"

    return step


def _stock_vmap(model: Any, rows: Rows) -> Step:
    return _ours(model, rows, engine="vmap", capture=False, performance=False, peft=False)


def _loop(model: Any, rows: Rows) -> Step:
    params = _trainable(model)

    def step() -> tuple[Grads, str]:
        total = {name: torch.zeros_like(p) for name, p in params.items()}
        for i in range(len(rows["labels"])):
            loss = model(**{name: x[i : i + 1] for name, x in rows.items()}).loss
            grads = torch.autograd.grad(loss, list(params.values()))
            norm = torch.stack([g.double().norm() for g in grads]).norm()
            scale = (CLIP / norm).clamp(max=1).float()
            for sum_, g in zip(total.values(), grads, strict=True):
                sum_.add_(g * scale)
        return total, "one backward a row"

    return step


def _ordinary(model: Any, rows: Rows) -> Step:
    params = _trainable(model)

    def step() -> tuple[Grads, str]:
        grads = torch.autograd.grad(model(**rows).loss, list(params.values()))
        return dict(zip(params, grads, strict=True)), ""

    return step


def _patched(model: Any, rows: Rows) -> Step:
    from opake.patches import apply_model_patches, apply_runtime_patches

    apply_runtime_patches()
    apply_model_patches(model)
    return _ordinary(model, {**rows, "loss_only": True})  # pyright: ignore[reportArgumentType]


def _liger(model: Any, rows: Rows) -> Step:
    from liger_kernel.transformers.monkey_patch import (  # pyright: ignore[reportMissingImports]
        _apply_liger_kernel_to_instance,
    )

    _apply_liger_kernel_to_instance(model=model.base_model.model)
    return _ordinary(model, rows)


def _opacus(model: Any, rows: Rows) -> Step:
    from opacus import GradSampleModule  # pyright: ignore[reportMissingImports]

    hooked = GradSampleModule(model, loss_reduction="mean", strict=False)
    params = _trainable(model)

    def step() -> tuple[Grads, str]:
        hooked.zero_grad()
        hooked(**rows).loss.backward()
        samples: Grads = {name: vars(p)["grad_sample"] for name, p in params.items()}
        norms = torch.stack([g.float().flatten(1).norm(dim=1) for g in samples.values()]).norm(dim=0)
        scale = (CLIP / norms).clamp(max=1)
        return {name: torch.einsum("b,b...->...", scale, g.float()) for name, g in samples.items()}, "hooks"

    return step


WAYS: dict[str, Way] = {
    "ours": Way(_ours, True, "opake, engine and capture chosen by itself"),
    "eager": Way(lambda m, r: _ours(m, r, capture=False), True, "opake, not captured"),
    "vmap": Way(lambda m, r: _ours(m, r, engine="vmap"), True, "opake, the vmap engine"),
    "vmap-eager": Way(lambda m, r: _ours(m, r, engine="vmap", capture=False), True, "the vmap engine, not captured"),
    "remat": Way(lambda m, r: _ours(m, r, remat="layer"), True, "opake, layers rematerialised"),
    "remat-mlp": Way(lambda m, r: _ours(m, r, remat="mlp"), True, "opake, the MLPs rematerialised"),
    "ordinary": Way(_patched, False, "an ordinary step of the patched model"),
    "hf": Way(_ordinary, False, "an ordinary step of the stock model"),
    "hf-vmap": Way(_stock_vmap, True, "the stock model under vmap: patched for correctness alone, not captured"),
    "liger": Way(_liger, False, "an ordinary step with Liger's kernels"),
    "opacus": Way(_opacus, True, "Opacus' hooks"),
    "loop": Way(_loop, True, "one backward a row, stock model"),
}
