"""What the tests of the trainer share: a tiny module, rows for it, and arguments that keep a run short."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from opake.errors import OpakeWarning
from opake.trainer import DPTrainer, TrainingArguments


class Classifier(nn.Module):
    """The module of the guide: a mapping with a loss if there are labels, and logits."""

    main_input_name = "features"

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, features, labels=None):
        logits = self.head(torch.tanh(self.body(features)))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows(count: int = 24) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    return [{"features": torch.randn(4, generator=generator), "labels": i % 3} for i in range(count)]


def classifier() -> Classifier:
    torch.manual_seed(0)
    return Classifier()


def arguments(folder: Path | str, **options: Any) -> TrainingArguments:
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no", "use_cpu": True}
    small = {"max_steps": 4, "use_compat_patches": False, "dataloader_pin_memory": False, "optim": "sgd"}
    batches = {} if "sampling_rate" in options else {"expected_batch_size": 6}
    noise = {} if "target_epsilon" in options else {"noise_multiplier": 1.0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OpakeWarning)
        return TrainingArguments(output_dir=str(folder), **{**quiet, **small, **batches, **noise, **options})


def trainer(folder: Path | str, *, of: type[DPTrainer] = DPTrainer, **given: Any) -> DPTrainer:
    """A trainer of the classifier; `given` may hold arguments of `Trainer`, all else are training arguments."""
    names = ("model", "train_dataset", "eval_dataset", "data_collator", "callbacks", "compute_metrics")
    own = {name: given.pop(name) for name in names if name in given}
    return of(args=arguments(folder, **given), **{"model": classifier(), "train_dataset": rows(), **own})


class Gradients(TrainerCallback):
    """Keeps the flat gradient that the optimiser sees at each step."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.seen.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).clone())

    def stacked(self) -> torch.Tensor:
        return torch.stack(self.seen)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])
