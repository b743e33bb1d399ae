"""Proofs (c) and (d), and that a run is an ordinary run of Transformers: logs, evaluation, saving, any model."""

from __future__ import annotations

import json
import logging
import math

import pytest
import torch
import transformers
from torch import nn
from transformers import TrainerCallback

from opake.checking.tiny import tiny_config, tiny_model
from opake.collate import RightPaddingCollator
from opake.demo.model import with_adapters
from opake.errors import GenericFamilyWarning, InputError
from opake.patches import restore_runtime
from opake.trainer import DPTrainer
from opake.trainer.accounting import Phase
from opake.trainer.sampling import PoissonSampler

from .subjects import Classifier, Gradients, arguments, classifier, rows, trainer, weights


@pytest.fixture(autouse=True)
def _clean_process():
    yield
    restore_runtime()


def texts(count: int = 12, length: int | None = None) -> list[dict]:
    generator = torch.Generator().manual_seed(2)
    sizes = torch.randint(4, 12, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(3, 97, (length or n,), generator=generator).tolist()} for n in sizes]


ORDINARY = {"learning_rate": 0.1, "lr_scheduler_type": "constant", "max_steps": 4}
EXACT = {"noise_multiplier": 0.0, "per_example_clip_norm": math.inf, "sampling_rate": 1.0, "microbatch_size": 5}


def ordinary(folder, model, data) -> torch.Tensor:
    """Weights after full-batch training by Transformers' own trainer."""
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=len(data),
        max_grad_norm=0.0,
        optim="sgd",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **ORDINARY,
    )
    transformers.Trainer(model, args, train_dataset=data).train()
    return weights(model)


def test_without_noise_and_bound_it_is_full_batch_training(tmp_path) -> None:
    expected = ordinary(tmp_path, classifier(), rows())
    it = trainer(tmp_path, **EXACT, **ORDINARY)
    it.train()
    torch.testing.assert_close(weights(it.model), expected, rtol=1e-6, atol=1e-7)
    assert (expected - weights(classifier())).abs().max() > 0.01


def test_without_noise_and_bound_it_is_full_batch_training_of_a_language_model(tmp_path) -> None:
    # by hand, because older versions of Transformers' trainer divide the loss by labels that are not predicted
    data, twin, model = texts(length=9), tiny_model("llama"), tiny_model("llama")
    optimiser = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(4):
        optimiser.zero_grad()
        twin(**RightPaddingCollator()(data)).loss.backward()
        optimiser.step()
    args = arguments(tmp_path, use_compat_patches=True, **EXACT, **ORDINARY)
    DPTrainer(model, args, train_dataset=data).train()
    torch.testing.assert_close(weights(model), weights(twin), rtol=1e-5, atol=2e-6)


def test_the_gradient_is_divided_by_the_expected_size_whatever_was_drawn(tmp_path) -> None:
    gradients = Gradients()
    it = trainer(tmp_path, callbacks=[gradients], **{**EXACT, "sampling_rate": 0.4}, learning_rate=0.0, noise_seed=3)
    it.train()
    data, model, sizes = rows(), classifier(), set()
    for step, found in enumerate(gradients.seen):
        chosen = it.sampler.draw(step)
        sizes.add(len(chosen))
        total = torch.zeros_like(found)
        for place in chosen:
            loss = model(data[place]["features"][None], torch.tensor([data[place]["labels"]]))["loss"]
            total += torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))])
        torch.testing.assert_close(found, total / (0.4 * len(data)), rtol=1e-5, atol=1e-7)
    assert len(sizes) > 1


def test_rows_are_clipped_one_by_one(tmp_path) -> None:
    gradients = Gradients()
    it = trainer(tmp_path, callbacks=[gradients], **{**EXACT, "per_example_clip_norm": 1e-3}, learning_rate=0.0)
    it.train()
    assert float(gradients.seen[0].norm()) <= 1e-3
    assert it.history.steps == len(gradients.seen) == 4


class Killed(TrainerCallback):
    """Ends a run as a crash would, in the middle of an epoch."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            raise KeyboardInterrupt


RESUMED = {"max_steps": 11, "save_strategy": "steps", "save_steps": 3, "optim": "adamw_torch", "learning_rate": 0.05}


@pytest.mark.parametrize(
    ("killed", "privacy"),
    [(4, {"noise_multiplier": 0.7}), (6, {"target_epsilon": 6.0}), (10, {"noise_multiplier": 0.7})],
)
def test_a_killed_run_resumes_to_the_same_epsilon_and_weights(tmp_path, killed, privacy) -> None:
    options = {**RESUMED, "noise_seed": 11, "expected_batch_size": 5, **privacy}
    whole = trainer(tmp_path / "whole", **options)
    whole.train()
    broken = trainer(tmp_path / "broken", callbacks=[Killed(killed)], **options)
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    again = trainer(tmp_path / "broken", **options)
    again.train(resume_from_checkpoint=True)
    assert torch.equal(weights(again.model), weights(whole.model))
    assert again.history.phases == whole.history.phases == (Phase(5 / 24, whole.history.phases[0][1], 11),)
    assert again.epsilon() == whole.epsilon() <= privacy.get("target_epsilon", math.inf)
    assert (again.state.global_step, again.state.epoch) == (whole.state.global_step, whole.state.epoch) == (11, 2.2)


def test_a_resumed_run_counts_all_steps_with_fresh_randomness(tmp_path) -> None:
    trainer(tmp_path, **{**RESUMED, "max_steps": 6}).train()
    again = trainer(tmp_path, **RESUMED)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert again.history.steps == again.state.global_step == 11


def test_without_a_history_nothing_is_resumed(tmp_path) -> None:
    trainer(tmp_path, **RESUMED).train()
    checkpoint = tmp_path / "checkpoint-9"
    again = trainer(tmp_path, **RESUMED)
    before = weights(again.model).clone()
    held = json.loads((checkpoint / "privacy.json").read_text())
    held["history"][0]["steps"] = 4
    (checkpoint / "privacy.json").write_text(json.dumps(held))
    with pytest.raises(InputError, match="has made 9 steps, but 4 of them were accounted"):
        again.train(resume_from_checkpoint=str(checkpoint))
    (checkpoint / "privacy.json").write_text("{}")
    with pytest.raises(InputError, match="holds no privacy history"):
        again.train(resume_from_checkpoint=str(checkpoint))
    (checkpoint / "privacy.json").unlink()
    with pytest.raises(InputError, match=r"has no privacy\.json.*resume from a checkpoint of DPTrainer"):
        again.train(resume_from_checkpoint=str(checkpoint))
    assert again.history.steps == 0
    assert torch.equal(weights(again.model), before)
    with pytest.raises(ValueError, match="No valid checkpoint"):
        trainer(tmp_path / "elsewhere").train(resume_from_checkpoint=True)


@pytest.mark.parametrize("privacy", [{"target_epsilon": 3.0}, {"noise_multiplier": 1.0}])
def test_a_complete_training_that_is_resumed_spends_nothing(tmp_path, privacy) -> None:
    """Transformers would make a tenth step of nine."""
    options = {**RESUMED, "max_steps": 9, **privacy}
    first = trainer(tmp_path, **options)
    first.train()
    again = trainer(tmp_path, **options)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == again.history.steps == 9
    assert torch.equal(weights(again.model), weights(first.model))
    assert again.epsilon() == first.epsilon()


def test_a_saved_model_is_no_checkpoint(tmp_path) -> None:
    it = trainer(tmp_path)
    it.train()
    it.save_model(str(tmp_path / "saved"))
    with pytest.raises(InputError, match=r"saved is no checkpoint.*trainer_state\.json.*take another"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "saved"))


def test_what_an_earlier_run_gave_away_is_not_forgotten(tmp_path) -> None:
    trainer(tmp_path, **{**RESUMED, "max_steps": 3}, noise_seed=1, log_private_statistics=True).train()
    again = trainer(tmp_path, **{**RESUMED, "max_steps": 6}, **LOGGED)
    assert not again.privacy_card()["test_only"]
    again.train(resume_from_checkpoint=True)
    for held in (again.privacy_card(), json.loads((tmp_path / "checkpoint-6" / "privacy.json").read_text())):
        assert held["test_only"] is held["logged_without_noise"] is True
        assert (held["steps"], held["history"][0]["steps"]) == (6, 6)
    assert "epsilon_test_only" in again.state.log_history[-1]


def test_counts_of_steps_and_epochs_survive_a_resume(tmp_path) -> None:
    trainer(tmp_path, **{**RESUMED, "max_steps": 6}).train()
    again = trainer(tmp_path, **RESUMED)
    seen = []

    class Epochs(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append((state.global_step, state.epoch))

    again.add_callback(Epochs())
    again.train(resume_from_checkpoint=True)
    # 4 steps are an epoch
    assert seen == [(step, step / 4) for step in range(7, 12)]


def drawn_steps(it: DPTrainer, monkeypatch) -> list[int]:
    """Numbers of the draws that are made from now on, in any training."""
    numbers: list[int] = []
    stock = PoissonSampler.draw
    monkeypatch.setattr(PoissonSampler, "draw", lambda self, number: numbers.append(number) or stock(self, number))
    return numbers


class Stop(TrainerCallback):
    def __init__(self, what: str, at: int) -> None:
        self.what, self.at = what, at

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            setattr(control, f"should_{self.what}_stop", True)


def test_an_epoch_or_a_training_that_a_callback_ends_early(tmp_path, monkeypatch) -> None:
    it = trainer(tmp_path, callbacks=[Stop("epoch", 3)], max_steps=7)
    numbers = drawn_steps(it, monkeypatch)
    it.train()
    assert numbers == list(range(7)), "nothing is drawn twice"
    it.add_callback(Stop("training", 2))
    assert it.train().global_step == 2
    assert numbers == list(range(9))
    assert it.history.steps == 9


@pytest.mark.parametrize(("ignore", "expected"), [(False, range(8, 11)), (True, range(9, 11))])
def test_a_resumed_epoch_goes_on_where_it_stood(tmp_path, monkeypatch, ignore, expected) -> None:
    trainer(tmp_path, **{**RESUMED, "max_steps": 9}).train()
    again = trainer(tmp_path, **RESUMED, ignore_data_skip=ignore)
    numbers = drawn_steps(again, monkeypatch)
    again.train(resume_from_checkpoint=True)
    # the first draw of the epoch is made and skipped, as Transformers does, or left out
    assert numbers == list(expected)
    assert again.history.steps == 11


def test_another_data_set_and_other_trainable_weights_in_a_second_training(tmp_path) -> None:
    it = trainer(tmp_path, expected_batch_size=6)
    it.train()
    it.train_dataset = rows(12)
    it.model.body.requires_grad_(False)
    body, head = it.model.body.weight.clone(), it.model.head.weight.clone()
    it.train()
    assert it.history.phases == (Phase(6 / 24, 1.0, 4), Phase(6 / 12, 1.0, 4))
    assert torch.equal(it.model.body.weight, body)
    assert not torch.equal(it.model.head.weight, head)


@pytest.mark.parametrize("privacy", [{"noise_multiplier": 1.0}, {"target_epsilon": 3.0}])
def test_a_plan_without_steps_ends_at_once(tmp_path, privacy) -> None:
    it = trainer(tmp_path, max_steps=-1, num_train_epochs=0, **privacy)
    it.train()
    assert (it.history.steps, it.epsilon()) == (0, 0)


@pytest.mark.parametrize("options", [{"sampling_rate": 1.0, "target_epsilon": 2.0}, {"sampling_rate": 1e-7}])
def test_extreme_sampling_rates(tmp_path, options) -> None:
    it = trainer(tmp_path, **options)
    it.train()
    assert it.history.phases == (Phase(options["sampling_rate"], it._sigma, 4),)
    assert 0 <= it.epsilon() <= 2


def test_a_data_set_of_one_row(tmp_path) -> None:
    it = trainer(tmp_path, train_dataset=rows(1), sampling_rate=0.5, target_delta=1e-3)
    it.train()
    assert it.history.steps == 4
    assert it.epsilon() > 1


def test_the_best_model_is_loaded_and_old_checkpoints_go(tmp_path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "save_total_limit": 1}
    stop = [transformers.EarlyStoppingCallback(2)]
    plan = {"max_steps": 20, "learning_rate": 0.0, "callbacks": stop}
    it = trainer(tmp_path, eval_dataset=rows(6), **options, **best, **plan)
    assert it.train().global_step == it.history.steps == 6
    assert [folder.name for folder in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert json.loads((tmp_path / "checkpoint-2" / "privacy.json").read_text())["steps"] == 2
    it.save_model()
    assert json.loads((tmp_path / "privacy.json").read_text())["steps"] == 6, "all that was spent to choose it"


def test_a_spent_budget_is_not_overdrawn(tmp_path) -> None:
    it = trainer(tmp_path, target_epsilon=2.0)
    it.train()
    spent = it.epsilon()
    assert 1.9 < spent <= 2.0
    with pytest.raises(InputError, match=r"8 steps, 4 of them made, would spend epsilon .* of target_epsilon=2.0"):
        it.train()
    assert it.epsilon() == spent
    free = trainer(tmp_path)
    free.train()
    once = free.epsilon()
    free.train()
    assert free.history.steps == 8
    assert free.epsilon() > once


def test_epochs_are_counted_in_expected_passes(tmp_path) -> None:
    it = trainer(tmp_path, max_steps=-1, num_train_epochs=2.5, expected_batch_size=6)
    it.train()
    assert it.state.global_step == it.history.steps == 10
    assert it.state.epoch == 2.5


LOGGED = {"logging_strategy": "steps", "logging_steps": 2}


def test_logs_hold_epsilon_and_nothing_without_noise(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO, "opake.trainer")
    it = trainer(tmp_path, **LOGGED, **{**RESUMED, "max_steps": 6})
    out = it.train()
    engine, *steps, end = it.state.log_history
    assert engine == {"engine": "vmap", "engine_reason": next(iter(it.engines)), "step": engine["step"]}
    assert "per-example gradients by the vmap engine: " in caplog.text
    assert [set(entry) for entry in steps] == 3 * [{"learning_rate", "grad_norm", "epsilon", "delta", "epoch", "step"}]
    assert [entry["epsilon"] for entry in steps] == sorted({entry["epsilon"] for entry in steps})
    assert not {"train_loss", "total_flos", "loss"} & set(end)
    assert end["epsilon"] == it.epsilon()
    assert math.isnan(out.training_loss)
    state = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    assert state["total_flos"] == state["num_input_tokens_seen"] == 0


def test_the_log_does_not_tell_in_which_step_a_row_was_first_drawn(tmp_path) -> None:
    it = trainer(tmp_path, **{**LOGGED, "logging_steps": 8}, max_steps=16, sampling_rate=0.01, noise_seed=0)
    first = next(step for step in range(16) if it.sampler.draw(step))
    it.train()
    entry = it.state.log_history[0]
    assert entry["engine"] == "vmap"
    assert 0 < first < 8 == entry["step"]


def test_the_norm_in_the_log_is_that_of_the_noisy_gradient(tmp_path) -> None:
    gradients = Gradients()
    it = trainer(tmp_path, callbacks=[gradients], logging_strategy="steps", logging_steps=1)
    it.train()
    logged = [entry["grad_norm"] for entry in it.state.log_history if "grad_norm" in entry]
    assert logged == pytest.approx(gradients.stacked().norm(dim=1).tolist())


def test_statistics_without_noise_are_logged_on_request(tmp_path) -> None:
    it = trainer(tmp_path, log_private_statistics=True, noise_seed=4, **LOGGED, max_steps=6)
    out = it.train()
    steps = [entry for entry in it.state.log_history if "batch_size" in entry]
    sizes = [len(it.sampler.draw(step)) for step in range(6)]
    assert [entry["batch_size"] for entry in steps] == [sum(sizes[i : i + 2]) / 2 for i in (0, 2, 4)]
    assert all(0 <= entry["clipped_fraction"] <= 1 and entry["dropped_rows"] == 0 for entry in steps)
    assert all(0.3 < entry["loss"] < 3 for entry in steps)
    assert all("epsilon_test_only" in entry and "epsilon" not in entry for entry in steps)
    weighted = sum(entry["loss"] * entry["batch_size"] * 2 for entry in steps) / sum(sizes)
    assert out.training_loss == pytest.approx(weighted, rel=1e-5)
    assert it.state.log_history[-1]["train_loss"] == pytest.approx(weighted, rel=1e-5)


def test_the_card_is_saved_with_the_model(tmp_path) -> None:
    it = trainer(tmp_path, noise_seed=1)
    it.train()
    it.save_model()
    card = json.loads((tmp_path / "privacy.json").read_text())
    assert card == it.privacy_card()
    assert card["epsilon"] == it.epsilon()
    assert card["test_only"] is True
    assert card["history"] == [it.history.phases[0]._asdict()]
    assert {"mechanism", "unit", "delta", "sampling", "accountant", "per_example_clip_norm", "versions"} <= set(card)
    text = (tmp_path / "PRIVACY.md").read_text()
    assert f"**epsilon = {card['epsilon']:.3f}** at delta" in text
    assert "For tests only" in text
    assert "Poisson, rate 0.25 of 24 rows" in text


def test_a_run_without_noise_claims_no_epsilon(tmp_path) -> None:
    it = trainer(tmp_path, **EXACT)
    it.train()
    it.save_model()
    assert math.isinf(it.epsilon())
    assert json.loads((tmp_path / "privacy.json").read_text())["epsilon"] is None
    assert "**no finite epsilon**" in (tmp_path / "PRIVACY.md").read_text()
    assert "For tests only" not in (tmp_path / "PRIVACY.md").read_text()


def test_evaluation_and_prediction_are_ordinary_and_cost_nothing(tmp_path) -> None:
    def accuracy(found):
        return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}

    it = trainer(tmp_path, eval_dataset=rows(7), compute_metrics=accuracy, per_device_eval_batch_size=3)
    metrics = it.evaluate()
    logits = it.model(torch.stack([row["features"] for row in rows(7)]))["logits"]
    labels = torch.tensor([row["labels"] for row in rows(7)])
    assert metrics["eval_accuracy"] == (logits.argmax(-1) == labels).double().mean().item()
    assert it.predict(rows(7)).predictions.shape == (7, 3)
    assert it.epsilon() == 0


def test_all_outputs_of_a_model_are_predictions_as_in_transformers(tmp_path) -> None:
    class Answering(Classifier):
        def forward(self, features, labels=None):
            out = super().forward(features, labels)
            logits = out.pop("logits")
            return {**out, "start_logits": logits, "end_logits": logits + 1}

    it = trainer(tmp_path, model=Answering())
    start, end = it.predict(rows(7)).predictions
    assert start.shape == end.shape == (7, 3)
    assert end - start == pytest.approx(torch.ones(7, 3).numpy())


def test_a_pushed_folder_has_the_card_of_the_weights_in_it(tmp_path) -> None:
    it = trainer(tmp_path / "run")
    it.args.push_to_hub = True
    it.train()
    it.save_model(str(tmp_path / "run" / "checkpoint-4"), _internal_call=True)
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoint-4"):
        assert json.loads((folder / "privacy.json").read_text())["steps"] == 4


class Smoothed(DPTrainer):
    """The documented way to another loss."""

    def compute_per_example_loss(self, model, row):
        assert row["features"].shape == (1, 4)
        assert isinstance(model, Classifier)
        out = model(row["features"])
        return nn.functional.cross_entropy(out["logits"], row["labels"], label_smoothing=0.3)


def test_the_loss_of_a_row_can_be_overridden(tmp_path) -> None:
    it = trainer(tmp_path, of=Smoothed, eval_dataset=rows(), **EXACT, **ORDINARY)
    model = classifier()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.stack([r["features"] for r in rows()]), torch.tensor([r["labels"] for r in rows()])
    loss = nn.functional.cross_entropy(model(x)["logits"], y, label_smoothing=0.3)
    assert it.evaluate()["eval_loss"] == pytest.approx(loss.item(), rel=1e-5)
    for _ in range(4):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x)["logits"], y, label_smoothing=0.3).backward()
        optimiser.step()
    it.train()
    torch.testing.assert_close(weights(it.model), weights(model), rtol=1e-5, atol=1e-6)
    assert set(it.engines.values()) == {"vmap"}


def test_a_model_without_a_loss_says_what_to_do(tmp_path) -> None:
    class Mute(Classifier):
        def forward(self, features, labels=None):
            return {"logits": self.head(self.body(features))}

    it = trainer(tmp_path, model=Mute(), eval_dataset=rows())
    with pytest.raises(InputError, match="Mute returned no loss"):
        it.train()
    assert it.history.steps == 1, "what failed after the draw is counted"
    with pytest.raises(InputError, match="override compute_per_example_loss"):
        it.evaluate()


# PEFT before 0.21 says so of a model that is in no folder
@pytest.mark.filterwarnings("ignore:Could not find a config file in  - will assume:UserWarning")
def test_an_adapter_is_trained_and_saved_in_the_format_of_peft(tmp_path) -> None:
    from peft import PeftModel

    model = with_adapters(tiny_model("llama"))
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    args = arguments(tmp_path, use_compat_patches=True, learning_rate=0.5, **LOGGED)
    it = DPTrainer(model, args, train_dataset=texts(), eval_dataset=texts(3))
    it.train()
    it.save_model()
    assert it.patch_report.rows
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
    again = PeftModel.from_pretrained(tiny_model("llama"), str(tmp_path))
    kept = {name: p for name, p in again.named_parameters() if "lora_" in name}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert kept.keys() == trained.keys()
    assert all(torch.equal(kept[name], trained[name]) for name in kept)
    assert (tmp_path / "privacy.json").is_file()


@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": True}, {"engine": "vmap"}])
def test_a_frozen_bfloat16_base_with_adapters(tmp_path, options) -> None:
    names = set(transformers.TrainingArguments.__dataclass_fields__)
    if not set(options) <= names | {"engine"}:
        options = {"gradient_checkpointing": True}
    model = with_adapters(tiny_model("llama").bfloat16())
    before = weights(model).clone()
    DPTrainer(model, arguments(tmp_path, use_compat_patches=True, **options), train_dataset=texts()).train()
    assert not torch.equal(weights(model), before)
    assert torch.isfinite(weights(model).float()).all()


def test_bfloat16_autocast_moves_float32_weights_as_float32_does(tmp_path) -> None:
    def moved(bf16: bool) -> torch.Tensor:
        model = tiny_model("llama")
        args = arguments(tmp_path, use_compat_patches=True, bf16=bf16, **EXACT, **ORDINARY)
        before = weights(model).clone()
        DPTrainer(model, args, train_dataset=texts()).train()
        return weights(model) - before

    exact, rounded = moved(False), moved(True)
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).norm() < 0.03 * exact.norm()


def padded(batch: list[dict]) -> dict[str, torch.Tensor]:
    made = RightPaddingCollator(keep_mask=True)([{"input_ids": row["input_ids"]} for row in batch])
    return {**made, "labels": torch.tensor([row["labels"] for row in batch])}


@pytest.mark.filterwarnings("ignore::opake.errors.GenericFamilyWarning")
@pytest.mark.parametrize("model_type", ["llama", "bert"])
def test_a_classification_head_on_a_transformers_model(tmp_path, model_type) -> None:
    assert issubclass(GenericFamilyWarning, Warning)
    config = tiny_config(model_type)
    config.num_labels, config.is_decoder = 3, False
    torch.manual_seed(0)
    data = [{**row, "labels": i % 3} for i, row in enumerate(texts())]
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    args = arguments(tmp_path, use_compat_patches=True, **EXACT, max_steps=1, learning_rate=0.1)
    twin = transformers.AutoModelForSequenceClassification.from_config(config)
    twin.load_state_dict(model.state_dict())
    it = DPTrainer(model, args, train_dataset=data, eval_dataset=data[:5], data_collator=padded)
    before = weights(model).clone()
    assert it.predict(data[:5]).predictions.shape == (5, 3)
    it.train()
    total = sum(twin.train()(**padded([row])).loss for row in data) / len(data)
    total.backward()
    used = [torch.zeros_like(p) if p.grad is None else p.grad for p in twin.parameters()]
    moved = torch.cat([g.reshape(-1) for g in used])
    torch.testing.assert_close(before - weights(model), 0.1 * moved, rtol=1e-3, atol=2e-6)


@pytest.mark.filterwarnings("ignore::opake.errors.GenericFamilyWarning")
def test_rows_of_causal_models_are_padded_right_by_default(tmp_path) -> None:
    it = DPTrainer(tiny_model("llama"), arguments(tmp_path, use_compat_patches=True), train_dataset=texts())
    assert isinstance(it.data_collator, RightPaddingCollator)
    assert not it.data_collator.keep_mask
    batch = next(batch for batch in it.get_train_dataloader() if batch.rows)
    ids, labels = batch.microbatches[0]["input_ids"], batch.microbatches[0]["labels"]
    assert ids.shape[1] % 8 == 0
    assert ((labels == -100) <= (ids == 0)).all()
    mixture = DPTrainer(
        tiny_model("mixtral", output_router_logits=True),
        arguments(tmp_path, use_compat_patches=True),
        train_dataset=texts(),
    )
    assert isinstance(mixture.data_collator, RightPaddingCollator)
    assert mixture.data_collator.keep_mask


def test_padding_of_a_tokenizer_makes_no_difference(tmp_path) -> None:
    """On either side; a mask that is left out must not turn padding into text."""
    found = []
    for side in (None, "left", "right"):
        data = [dict(row) for row in texts()]
        for row in data if side else ():
            ids, missing = row["input_ids"], 14 - len(row["input_ids"])
            ones, zeros = [1] * len(ids), [0] * missing
            row["input_ids"] = zeros + ids if side == "left" else ids + zeros
            row["attention_mask"] = zeros + ones if side == "left" else ones + zeros
        model = tiny_model("llama")
        args = arguments(tmp_path, use_compat_patches=True, **EXACT, **ORDINARY)
        DPTrainer(model, args, train_dataset=data).train()
        found.append(weights(model))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_workers_and_columns_that_the_model_does_not_take(tmp_path) -> None:
    data = [{**row, "comment": "never seen"} for row in rows()]
    it = trainer(tmp_path, train_dataset=data, dataloader_num_workers=1, noise_seed=2, optim="adamw_torch")
    alone = trainer(tmp_path, noise_seed=2, optim="adamw_torch")
    for one in (it, alone):
        one.train()
    assert torch.equal(weights(it.model), weights(alone.model))


def test_accounting_without_the_library_says_how_to_get_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting.pld", None)
    with pytest.raises(ImportError, match=r"pip install 'opake\[dp\]'"):
        trainer(tmp_path)
