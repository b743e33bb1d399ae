"""Load, attach adapters, train privately, save the adapter with its privacy card, say what came out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import PrinterCallback

from opake.collate import RightPaddingCollator
from opake.demo.curves import sketch
from opake.demo.model import load, with_adapters
from opake.errors import InputError
from opake.patches import restore_runtime
from opake.plots import check_plot
from opake.trainer import DPTrainer, TrainingArguments

from . import data
from .live import Live, draw


@dataclass(frozen=True, slots=True)
class Plan:
    """What the command line asks for; lengths in tokens, batches in rows."""

    model: str | None
    dataset: str
    output: Path
    target_epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float | None = None
    clip_norm: float = 1.0
    batch_size: float = 32
    microbatch_size: int = 8
    steps: int = 100
    length: int = 128
    learning_rate: float = 1e-3
    rank: int = 8
    field: str = "text"
    noise_seed: int | None = None
    plot: Path | None = None
    resume: bool = False


def run(plan: Plan) -> None:
    """Carry out a plan; what it prints is plain text."""
    check_plot(plan.plot, made=plan.output)
    if plan.output.exists() and not plan.output.is_dir():
        raise InputError(f"--output {plan.output} is a file; name a folder")
    if plan.resume and not list(plan.output.glob("checkpoint-*")):
        raise InputError(f"{plan.output} has no checkpoint to resume from; leave out --resume")
    args = _arguments(plan)
    subject = load(plan.model)
    training, held_out = data.load(plan.dataset, plan.field, subject.encode, plan.length)
    model = with_adapters(subject.model, plan.rank)
    collator, live = RightPaddingCollator(length=plan.length), Live()
    trainer = DPTrainer(model, args, collator, training, held_out, callbacks=[live])
    trainer.remove_callback(PrinterCallback)
    print(f"{subject.name}: {len(training)} rows of up to {plan.length} tokens, {len(held_out)} more held out")
    try:
        trainer.train(resume_from_checkpoint=plan.resume)
        trainer.save_model()
    finally:
        restore_runtime()
    _report(trainer, plan)


def _arguments(plan: Plan) -> TrainingArguments:
    every = max(1, plan.steps // 10)
    told: dict[str, Any] = {
        "logging_steps": every,
        "eval_strategy": "steps",
        "eval_steps": every,
        "eval_on_start": True,
    }
    kept = {"save_strategy": "steps", "save_steps": every, "save_total_limit": 1, "report_to": [], "disable_tqdm": True}
    return TrainingArguments(
        output_dir=str(plan.output),
        use_performance_kernels=True,
        target_epsilon=plan.target_epsilon,
        noise_multiplier=plan.noise_multiplier,
        target_delta=plan.delta,
        per_example_clip_norm=plan.clip_norm,
        expected_batch_size=plan.batch_size,
        microbatch_size=plan.microbatch_size,
        per_device_eval_batch_size=plan.microbatch_size,
        max_steps=plan.steps,
        learning_rate=plan.learning_rate,
        noise_seed=plan.noise_seed,
        dataloader_pin_memory=torch.cuda.is_available(),
        **told,
        **kept,
    )


def _report(trainer: DPTrainer, plan: Plan) -> None:
    for reason, engine in trainer.engines.items():
        print(f"engine {engine}: {reason}")
    only = "for tests only, the seed is public: " if plan.noise_seed is not None else ""
    noise = trainer.history.phases[-1].noise_multiplier
    print(f"{only}epsilon {trainer.epsilon():.3f} at delta {trainer.delta:.2e}, noise multiplier {noise:.3f}")
    print("\n".join(sketch(trainer.state.log_history)))
    print(f"adapter and privacy card in {plan.output}")
    if plan.plot is not None:
        draw(trainer.state.log_history, plan.plot)
        print(f"curves in {plan.plot}")
