"""`DPTrainer`: Transformers' trainer whose gradient is clipped per example, noised and accounted.

Only what privacy needs is overridden: batches, the gradient of a step, what is logged and saved.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader
from transformers.trainer_utils import get_last_checkpoint

from opake.collate import LogicalBatch, Microbatches, Rows, padding_right
from opake.errors import InputError, OptionTypeError
from opake.functional import clipped_grad
from opake.functional.module import in_place
from opake.functional.nested import map_tensors, tensors_of
from opake.patches import apply_model_patches, apply_runtime_patches
from opake.trainer import card, traps
from opake.trainer.accounting import Accountant, History, PLDAccountant, noise_for
from opake.trainer.arguments import TrainingArguments
from opake.trainer.gradient import PrivateGradient, Statistics
from opake.trainer.randomness import Randomness
from opake.trainer.sampling import PoissonSampler

_log = logging.getLogger("opake.trainer")


class DPTrainer(transformers.Trainer):
    """`transformers.Trainer` with DP-SGD (Abadi et al. 2016), its arguments, and `args` of opake.

    The model is patched here: attach adapters before. history: the noisy steps made so far. accountant: turns them into
    epsilon. patch_report: what `apply_model_patches` did. engines: how gradients were computed, and why so.

    Raises InputError for whatever would break privacy in silence (`opake.trainer.traps`), UnsupportedModel for a module
    that is no Transformers model without `use_compat_patches=False`, MissingDependency without dp-accounting.
    """

    args: TrainingArguments
    model: Any
    optimizer: Any
    # what Transformers says about it depends on whether `datasets` is installed
    train_dataset: Any

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        **named: Any,
    ) -> None:
        if not isinstance(args, TrainingArguments):
            raise OptionTypeError(f"args is an opake.trainer.TrainingArguments, got {type(args).__name__}")
        if not isinstance(model, nn.Module):
            raise OptionTypeError(f"model is an nn.Module, got {type(model).__name__}; model_init is not taken")
        self._own_loss = type(self).compute_per_example_loss is not DPTrainer.compute_per_example_loss
        batch_loss = named.get("compute_loss_func") or type(self).compute_loss is not DPTrainer.compute_loss
        if batch_loss and not self._own_loss:
            raise InputError("the loss of a batch is not trained on; override compute_per_example_loss(model, row)")
        traps.refuse(model, args, data_collator, train_dataset)
        self.accountant: Accountant = PLDAccountant()
        self.history, self.engines, self._skipped = History(), {}, 0
        self._sampler = self._poisson(args, train_dataset)
        collator = data_collator or padding_right(model, processing_class)
        super().__init__(model, args, collator, train_dataset, eval_dataset, processing_class, **named)
        traps.refuse_launch(self)
        apply_runtime_patches(**args.patch_flags())
        self.patch_report = apply_model_patches(model, **args.patch_flags())
        self._gradient: PrivateGradient | None = None

    def compute_per_example_loss(self, model: nn.Module, row: dict[str, Any]) -> torch.Tensor:
        """The loss of one row, a scalar; override it to change what is learned, by the vmap engine then.

        row: what the collator made of one row, a batch of one: every tensor has a leading dimension of 1. It runs under
        `torch.func`, so it must not branch on values.
        """
        return _loss_in(model(**row), model)

    def _poisson(self, args: TrainingArguments, dataset: Any) -> PoissonSampler | None:
        def first() -> int:
            skipped, self._skipped = self._skipped, 0
            return self.history.steps - skipped

        if dataset is None:
            return None
        rows, randomness = len(dataset), Randomness(args.noise_seed, args.process_index)
        return PoissonSampler(rows, args.rate_for(rows), randomness, first=first, processes=args.world_size)

    @property
    def sampler(self) -> PoissonSampler:
        """The only source of batches and of the sampling rate that is accounted."""
        if self._sampler is None:
            raise ValueError("DPTrainer: training and accounting need a train_dataset")
        return self._sampler

    def get_train_dataloader(self) -> DataLoader:
        """Logical batches, cut into microbatches; never sharded by accelerate, for each process has its own share."""
        args, dataset, collator = self.args, self.train_dataset, self.data_collator
        if hasattr(dataset, "column_names"):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collator = self._get_collator_with_removed_columns(collator, description="training")
        return DataLoader(
            Rows(dataset),
            batch_sampler=self.sampler,
            collate_fn=Microbatches(collator, self._microbatch_size()),
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            **{k: getattr(args, f"dataloader_{k}") for k in ("num_workers", "persistent_workers", "prefetch_factor")},
        )

    def _microbatch_size(self) -> int:
        share = math.ceil(self.sampler.expected / self.sampler.processes)
        return self.args.microbatch_size or max(1, min(self.args.per_device_train_batch_size, share))

    def get_total_train_batch_size(self, args: Any) -> int:
        """The expected size: what Transformers shows, and computes throughput from."""
        return max(1, round(self.sampler.expected))

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Set the noisy gradient of one logical batch; returns NaN, for the loss is private."""
        self.model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        batch: LogicalBatch = inputs.to(self.args.device)
        gradient, done = self._gradient or self._build_gradient(), self.history.steps
        # counted first: should anything fail from here on, too much is reported and not too little
        self.history.add(self.sampler.rate, self._sigma)
        seen = gradient(batch, noise_multiplier=self._sigma, expected=self.sampler.expected, step=done)
        self.engines.update((one.reason, one.engine) for one in seen)
        if self.args.log_private_statistics:
            self._statistics.add(seen, batch.rows)
        return torch.full((), math.nan, device=self.args.device)

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Of the noisy gradient, which is public; Transformers would walk through the model to find it."""
        return (self._gradient or self._build_gradient()).norm

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_log:
            # takes long, so before logging waits for the device; `log` finds it in the accountant's memory
            self.epsilon()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _build_gradient(self) -> PrivateGradient:
        args, target = self.args, self._row_loss if self._own_loss else self.model
        bound, size = args.per_example_clip_norm, self._microbatch_size()
        clipped = clipped_grad(target, clip_norm=bound, microbatch_size=size, engine=args.engine)
        trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._gradient = PrivateGradient(clipped, trainable, self.sampler.randomness, bound, args.world_size)
        return self._gradient

    def _row_loss(self, params: Mapping[str, torch.Tensor], **row: Any) -> torch.Tensor:
        with in_place(self.model, params):
            return self.compute_per_example_loss(self.model, map_tensors(lambda value: value.unsqueeze(0), row))

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **named: Any) -> Any:
        """Loss of an evaluation batch, and outputs by name; training does not come here."""
        logits = return_outputs and not self.args.prediction_loss_only
        outputs = model(**inputs) if logits or not self._own_loss else {}
        if self._own_loss:
            count = tensors_of(inputs)[0].shape[0]
            rows = (map_tensors(lambda value, i=i: value[i : i + 1], dict(inputs)) for i in range(count))
            loss = torch.stack([self.compute_per_example_loss(model, row) for row in rows]).mean()
        else:
            loss = _loss_in(outputs, model)
        named = {**outputs, "loss": loss} if isinstance(outputs, Mapping) else {"loss": loss}
        return (loss, named) if return_outputs else loss

    def epsilon(self, delta: float | None = None) -> float:
        """What has been spent so far, at `delta` (default: `self.delta`)."""
        return self.accountant.epsilon(self.history.phases, delta or self.delta)

    @property
    def delta(self) -> float:
        """`target_delta`, or N ** -1.1 for N rows."""
        return self.args.target_delta or max(2, self.sampler.rows) ** -1.1

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As in Transformers; InputError for a checkpoint without history, or a plan beyond `target_epsilon`."""
        folder, done = resume_from_checkpoint, 0
        if folder is True:
            folder = get_last_checkpoint(str(self.args.output_dir)) or True
        # anything may have changed since construction
        traps.refuse(self.model, self.args, self.data_collator, self.train_dataset)
        self._sampler, self._gradient = self._poisson(self.args, self.train_dataset), None
        if folder and folder is not True:
            history, done = card.read_history(folder)
            self.history = max(history, self.history, key=lambda known: known.steps)
        self._skipped = 0 if self.args.ignore_data_skip else done % len(self.sampler)
        plan = self.args.max_steps, math.ceil(self.args.num_train_epochs * len(self.sampler))
        left = max(0, plan[plan[0] <= 0] - done)
        self._sigma = self._planned_noise(left)
        # Transformers would make one more step of a training that is complete
        self.sampler.stop = self.history.steps + left
        self.history.test_only |= self.args.noise_seed is not None
        self.history.logged_without_noise |= self.args.log_private_statistics
        self._statistics = Statistics(self.args.device)
        out = super().train(folder, *args, **kwargs)
        return out._replace(training_loss=self._statistics.mean_loss())

    def _planned_noise(self, left: int) -> float:
        """The noise multiplier of the `left` steps to come; makes the accountant know such a step before training."""
        target, sigma = self.args.target_epsilon, self.args.noise_multiplier or 0.0
        planned, rate = History(self.history.phases), self.sampler.rate
        if target is not None:
            known = planned.phases[-1].noise_multiplier if planned.phases else None
            sigma = known or noise_for(target, self.delta, rate, left, self.accountant)
        planned.add(rate, sigma, left)
        epsilon = self.accountant.epsilon(planned.phases, self.delta)
        if epsilon > (target or math.inf):
            raise InputError(
                f"{planned.steps} steps, {self.history.steps} of them made, would spend epsilon {epsilon:.3f} of "
                f"target_epsilon={target}; plan fewer steps, or raise target_epsilon"
            )
        return sigma

    def privacy_card(self) -> dict[str, Any]:
        """What was done and what follows from it, as written next to the weights."""
        drawn, facts = self.sampler, {"delta": self.delta, "accountant": self.accountant.name}
        facts |= {name: getattr(self.args, name) for name in ("target_epsilon", "per_example_clip_norm")}
        sampling = f"Poisson, rate {drawn.rate:.6g} of {drawn.rows} rows, {drawn.expected:.6g} expected a step"
        return card.make(self.history, self.epsilon(), **facts, sampling=sampling, processes=self.args.world_size)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add epsilon and delta to training logs; losses only where `log_private_statistics` asks for them."""
        over = "train_runtime" in logs
        if over or "learning_rate" in logs:
            for key in ("loss", "train_loss", "total_flos"):
                logs.pop(key, None)
            self._tell_engines()
            if self.args.log_private_statistics:
                taken = self._statistics.take()
                logs.update({"train_loss": self._statistics.mean_loss()} if over else taken)
            name = "epsilon_test_only" if self.history.test_only else "epsilon"
            logs.update({name: self.epsilon(), "delta": self.delta})
        super().log(logs, *args, **kwargs)

    def _tell_engines(self) -> None:
        """Which engine ran and why; not in the step where a row was first drawn, for that is private."""
        told = {entry.get("engine_reason") for entry in self.state.log_history}
        for reason, engine in self.engines.items():
            if reason not in told:
                _log.info("per-example gradients by the %s engine: %s", engine, reason)
                entry: Any = {"engine": engine, "engine_reason": reason, "step": self.state.global_step}
                self.state.log_history.append(entry)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as Transformers does, and the privacy card beside it."""
        super().save_model(output_dir, _internal_call)
        # a push copies the weights of a checkpoint into the folder of the run, but not its card
        folders = {output_dir or self.args.output_dir} | ({self.args.output_dir} if self.args.push_to_hub else set())
        for folder in folders if self.args.should_save and self._sampler is not None else ():
            card.write(str(folder), self.privacy_card())

    def floating_point_ops(self, inputs: Any) -> int:
        """0: the true number depends on how many rows were drawn."""
        return 0

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError("hyperparameter_search spends privacy in each trial without accounting; search on public data")


def _loss_in(outputs: Any, model: nn.Module) -> torch.Tensor:
    value = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if value is None:
        raise InputError(f"{type(model).__name__}: no 'loss'; return one by name, or override compute_per_example_loss")
    return value
