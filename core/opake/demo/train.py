"""DP-SGD (Abadi et al., 2016) with `DPTrainer` on a real model, after its gradients have been compared with a loop.

The seed is public, so that every run shows the same: what epsilon would be is told, but nobody is protected by it.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback

from opake.collate import RightPaddingCollator
from opake.errors import OpakeError, OpakeWarning
from opake.functional import per_example_grads
from opake.patches import apply_model_patches, apply_runtime_patches, restore, restore_runtime
from opake.trainer import DPTrainer, TrainingArguments

from .curves import sketch
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
    console.print(
        f"\nper-example gradients and a float64 loop of four backward passes {verdict}: relative error {error:.1e}"
    )
    before = _mean_loss(model, held_out, settings)
    trainer = _trainer(console, model, training, settings, seed)
    trainer.train()
    after = _mean_loss(model, held_out, settings)
    trainer.save_model()
    for line in sketch(trainer.state.log_history):
        console.print(line)
    console.print(f"held-out loss {before:.3f} -> {after:.3f} after {settings.steps} private steps")
    for reason, engine in trainer.engines.items():
        console.print(f"engine: {engine} ({reason})")
    spent = f"epsilon {trainer.epsilon():.2f} at delta {trainer.delta:.1e}"
    public = "" if seed is None else ", if the seed were not public"
    console.print(f"sampling rate {trainer.sampler.rate:.4f}, noise {settings.noise}: {spent}{public}")
    console.print(f"adapter and privacy card in {trainer.args.output_dir}")
    console.print(f"{time.monotonic() - began:.0f} s in all")
    return 0 if agrees else 1


def _batch(rows: Rows, settings: Settings) -> dict[str, torch.Tensor]:
    return RightPaddingCollator(length=settings.length)(rows)


def _verify(model: nn.Module, params: Mapping[str, nn.Parameter], rows: Rows, settings: Settings) -> float:
    """The largest relative error of the per-example gradients against a float64 loop over rows, unpatched.

    In float32 the loop is no judge: where a model is sure of a token, its cross-entropy cancels to a few digits.
    """
    model.eval()
    # adapters start at zero, and zero gradients would agree with anything
    with torch.no_grad():
        for p in params.values():
            p.add_(torch.randn_like(p) * 1e-2)
    got = per_example_grads(model)(params, **_batch(rows, settings))
    restore(model)
    model.double()
    worst = 0.0
    for number, row in enumerate(rows):
        ids = torch.tensor([row["input_ids"]])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        expected = torch.autograd.grad(nn.functional.cross_entropy(logits, ids[0, 1:]), list(params.values()))
        for name, gradient in zip(params, expected, strict=True):
            scale = gradient.abs().max().clamp(min=1e-12)
            worst = max(worst, float((got[name][number] - gradient).abs().max() / scale))
    model.float()
    apply_model_patches(model)
    model.train()
    return worst


@torch.no_grad()
def _mean_loss(model: nn.Module, rows: Rows, settings: Settings) -> float:
    model.eval()
    losses = [float(model(**_batch([row], settings)).loss) for row in rows[:16]]
    model.train()
    return sum(losses) / len(losses)


class _Lines(TrainerCallback):
    """A line for each step."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "batch_size" not in logs:
            return
        spent = next(value for name, value in logs.items() if name.startswith("epsilon"))
        head = f"step {state.global_step:3d}  epsilon {spent:5.2f}  rows {logs['batch_size']:2.0f}"
        seen = (
            f"  loss {logs['loss']:.3f}  clipped {logs['clipped_fraction']:4.0%}" if "loss" in logs else "  noise alone"
        )
        self._console.print(head + seen)


def _trainer(console: Console, model: nn.Module, rows: Rows, settings: Settings, seed: int | None) -> DPTrainer:
    """Everything is shown here, also what carries no noise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OpakeWarning)
        args = TrainingArguments(
            output_dir=tempfile.mkdtemp(prefix="opake-demo-"),
            noise_multiplier=settings.noise,
            noise_seed=seed,
            per_example_clip_norm=settings.clip_norm,
            expected_batch_size=settings.batch,
            microbatch_size=settings.microbatch,
            max_steps=settings.steps,
            learning_rate=settings.rate,
            lr_scheduler_type="constant",
            logging_steps=1,
            log_private_statistics=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
    collator = RightPaddingCollator(length=settings.length)
    trainer = DPTrainer(model, args, collator, train_dataset=rows, callbacks=[_Lines(console)])
    trainer.remove_callback(PrinterCallback)
    return trainer
