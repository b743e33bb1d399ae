"""DP-SGD by hand on the public API: Poisson sampling, per-example clipping, noise once a step (Abadi et al., 2016).

It shows how the pieces fit and what they cost; it is no trainer. Noise comes from the operating system unless a seed is
given. There is no privacy accountant here, so no epsilon is claimed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

from opake.collate import RightPaddingCollator
from opake.errors import OpakeError
from opake.functional import ClippedGrad, clipped_grad, per_example_grads
from opake.patches import apply_model_patches, apply_runtime_patches, restore, restore_runtime

from .model import load, with_adapters
from .text import Rows, rows_of

TOLERANCE = 5e-5


@dataclass(frozen=True, slots=True)
class Settings:
    """T tokens a row, rows expected in a batch, rows at once, clipping norm, noise multiplier, learning rate, steps."""

    length: int = 64
    batch: int = 8
    microbatch: int = 8
    clip_norm: float = 1.0
    noise: float = 0.5
    rate: float = 2e-3
    steps: int = 15


def run(model: str | None = None, text: Path | None = None, steps: int | None = None, seed: int | None = 0) -> int:
    """Run the demo and print what happens; the exit code is 0, or 1 if the gradients do not agree with the loop.

    model: name or directory of a causal LM. text: a file. seed: of sampling, noise and adapters; None: unpredictable.
    """
    console = Console(soft_wrap=True, highlight=False)
    try:
        return _run(console, model, text, Settings(**({} if steps is None else {"steps": steps})), seed)
    except OpakeError as error:
        console.print(f"error: {error}")
        return 2
    finally:
        restore_runtime()


def _run(console: Console, name: str | None, text: Path | None, settings: Settings, seed: int | None) -> int:
    began = time.monotonic()
    generator = torch.Generator().manual_seed(secrets.randbits(63) if seed is None else seed)
    torch.manual_seed(0 if seed is None else seed)
    console.print("loading the model")
    subject = load(name)
    training, held_out = rows_of(text, subject.encode, settings.length)
    model = with_adapters(subject.model).train()
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    count = sum(p.numel() for p in params.values())
    console.print(
        f"{subject.name}: {len(training)} rows of up to {settings.length} tokens, {count:,} trainable numbers"
    )
    apply_runtime_patches()
    console.print(str(apply_model_patches(model)))
    error = _verify(model, params, training[:4], settings)
    agrees = error <= TOLERANCE
    verdict = "agree" if agrees else "DO NOT agree"
    console.print(f"\nper-example gradients and a loop of four backward passes {verdict}: relative error {error:.1e}")
    before = _mean_loss(model, held_out, settings)
    _train(console, model, params, training, settings, generator)
    after = _mean_loss(model, held_out, settings)
    console.print(f"held-out loss {before:.3f} -> {after:.3f} after {settings.steps} private steps")
    console.print(f"sampling rate {settings.batch / len(training):.4f}, noise {settings.noise}: " + _epsilon())
    console.print(f"{time.monotonic() - began:.0f} s in all")
    return 0 if agrees else 1


def _epsilon() -> str:
    return "no epsilon is claimed, because this demo has no accountant"


def _batch(rows: Rows, settings: Settings) -> dict[str, torch.Tensor]:
    return RightPaddingCollator(length=settings.length)(rows)


def _verify(model: nn.Module, params: Mapping[str, nn.Parameter], rows: Rows, settings: Settings) -> float:
    """The largest relative error of the per-example gradients against a loop over rows of the unpatched model."""
    model.eval()
    # adapters start at zero, and zero gradients would agree with anything
    with torch.no_grad():
        for p in params.values():
            p.add_(torch.randn_like(p) * 1e-2)
    got = per_example_grads(model)(params, **_batch(rows, settings))
    restore(model)
    worst = 0.0
    for number, row in enumerate(rows):
        ids = torch.tensor([row["input_ids"]])
        expected = torch.autograd.grad(model(input_ids=ids, labels=ids, use_cache=False).loss, list(params.values()))
        for name, gradient in zip(params, expected, strict=True):
            scale = gradient.abs().max().clamp(min=1e-12)
            worst = max(worst, float((got[name][number] - gradient).abs().max() / scale))
    apply_model_patches(model)
    model.train()
    return worst


@torch.no_grad()
def _mean_loss(model: nn.Module, rows: Rows, settings: Settings) -> float:
    model.eval()
    losses = [float(model(**_batch([row], settings)).loss) for row in rows[:16]]
    model.train()
    return sum(losses) / len(losses)


def _train(
    console: Console,
    model: nn.Module,
    params: Mapping[str, nn.Parameter],
    rows: Rows,
    settings: Settings,
    generator: torch.Generator,
) -> None:
    gradient = clipped_grad(model, clip_norm=settings.clip_norm, microbatch_size=settings.microbatch)
    optimiser = torch.optim.AdamW(params.values(), lr=settings.rate)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("private steps", total=settings.steps)
        for step in range(settings.steps):
            drawn = torch.rand(len(rows), generator=generator) < settings.batch / len(rows)
            chosen = [row for row, taken in zip(rows, drawn.tolist(), strict=True) if taken]
            result = gradient(params, **_batch(chosen, settings))
            _noisy_step(params, result, optimiser, settings, generator)
            progress.advance(task)
            console.print(_line(step, len(chosen), result))
            if step == 0:
                console.print(f"engine: {result.engine} ({result.reason})")


def _noisy_step(
    params: Mapping[str, nn.Parameter],
    result: ClippedGrad,
    optimiser: torch.optim.Optimizer,
    settings: Settings,
    generator: torch.Generator,
) -> None:
    """Noise is added once, to the sum, and the sum is divided by the expected size, never by the realised one."""
    for name, p in params.items():
        noise = torch.randn(p.shape, generator=generator) * (settings.noise * settings.clip_norm)
        p.grad = ((result.grads[name] + noise.to(p)) / settings.batch).to(p.dtype)
    optimiser.step()


def _line(step: int, drawn: int, result: ClippedGrad) -> str:
    if drawn == 0:
        return f"step {step + 1:3d}  no rows drawn: noise alone"
    values: Any = result
    share = float(values.clipped) / drawn
    return f"step {step + 1:3d}  rows {drawn:2d}  loss {float(values.losses.mean()):.3f}  clipped {share:4.0%}"
