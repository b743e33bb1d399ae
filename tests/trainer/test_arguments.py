"""Arguments: what they mean, and which values are refused before anything happens."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import DataCollatorWithFlattening, HfArgumentParser

from opake.checking.tiny import tiny_model
from opake.errors import InputError, OpakeWarning, OptionTypeError, UnknownOption, UnsupportedModel
from opake.patches import is_runtime_patched, restore_runtime
from opake.trainer import DPTrainer, TrainingArguments
from opake.trainer import trainer as module

from .subjects import arguments, classifier, rows, trainer, weights


@pytest.fixture(autouse=True)
def _clean_process():
    yield
    restore_runtime()


@pytest.mark.parametrize("given", [{}, {"target_epsilon": 8.0, "noise_multiplier": 1.0}])
def test_both_or_neither_of_epsilon_and_noise_is_a_value_error(tmp_path, given) -> None:
    with pytest.raises(ValueError, match="either target_epsilon or noise_multiplier"):
        TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"target_epsilon": 0.0}, "target_epsilon is positive, got 0.0"),
        ({"noise_multiplier": -1.0}, "noise_multiplier is 0 or positive"),
        ({"noise_multiplier": float("inf")}, "noise_multiplier is 0 or positive, and finite"),
        ({"noise_multiplier": float("nan")}, "noise_multiplier is 0 or positive"),
        ({"target_delta": 1.0}, "target_delta is between 0 and 1"),
        ({"per_example_clip_norm": 0.0}, "per_example_clip_norm is positive"),
        ({"per_example_clip_norm": float("inf")}, "bounds nothing"),
        ({"expected_batch_size": 0}, "expected_batch_size is positive"),
        ({"sampling_rate": 1.5}, "sampling_rate is above 0 and at most 1"),
        ({"expected_batch_size": 4, "sampling_rate": 0.1}, "say the same"),
        ({"microbatch_size": 0}, "microbatch_size is a whole number from 1"),
        ({"microbatch_size": 2.5}, "microbatch_size is a whole number from 1"),
        ({"microbatch_size": 2.0}, "microbatch_size is a whole number from 1"),
        ({"engine": "fast"}, "engine is one of auto, vmap, batched"),
    ],
)
def test_values_without_sense(tmp_path, given, says) -> None:
    with pytest.raises(InputError, match=says):
        arguments(tmp_path, **given)


@pytest.mark.parametrize(
    "given", [{"noise_seed": True}, {"noise_seed": "1"}, {"noise_multiplier": "1"}, {"performance_kernels_config": [1]}]
)
def test_values_of_a_wrong_type(tmp_path, given) -> None:
    with pytest.raises(OptionTypeError):
        arguments(tmp_path, **given)


def test_an_unknown_key_of_the_kernels_is_an_error_that_names_the_nearest(tmp_path) -> None:
    with pytest.raises(UnknownOption, match="did you mean rope"):
        arguments(tmp_path, performance_kernels_config={"ropee": False})


def test_a_public_seed_warns(tmp_path) -> None:
    with pytest.warns(OpakeWarning, match="noise_seed=3 is public"):
        TrainingArguments(output_dir=str(tmp_path), use_cpu=True, noise_multiplier=1.0, noise_seed=3)


def test_the_command_line_of_transformers_reads_the_fields(tmp_path) -> None:
    line = ["--output_dir", str(tmp_path), "--use_cpu", "--target_epsilon", "3", "--microbatch_size", "2"]
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        [*line, "--performance_kernels_config", '{"rope": false}']
    )
    assert (args.target_epsilon, args.microbatch_size, args.performance_kernels_config) == (3.0, 2, {"rope": False})
    assert all(field.metadata.get("help") for field in dataclasses.fields(args))


@pytest.mark.parametrize(
    ("given", "config", "wanted"),
    [
        ({}, {}, {"compat": True, "kernels": False}),
        ({"use_performance_kernels": True}, {}, {"compat": True, "kernels": True}),
        ({}, {"kv_cache": False, "chunked_linear_cross_entropy": 16}, {"compat": True, "kernels": False}),
    ],
)
def test_flags_go_to_both_apply_functions(tmp_path, monkeypatch, given, config, wanted) -> None:
    calls = []
    for name in ("apply_runtime_patches", "apply_model_patches"):
        stock = getattr(module, name)

        def noted(*args, name=name, stock=stock, **flags):
            calls.append((name, flags))
            return stock(*args, **flags)

        monkeypatch.setattr(module, name, noted)
    args = arguments(tmp_path, use_compat_patches=True, performance_kernels_config=config or None, **given)
    DPTrainer(tiny_model("llama"), args, train_dataset=[{"input_ids": [3, 4, 5]}] * 8)
    assert is_runtime_patched()
    flags = {**wanted, "performance": True, "peft": True, **config}
    assert calls == [("apply_runtime_patches", flags), ("apply_model_patches", flags)]


def test_the_expected_size_follows_from_what_is_given(tmp_path) -> None:
    assert trainer(tmp_path, expected_batch_size=6).sampler.rate == 6 / 24
    assert trainer(tmp_path, sampling_rate=0.5).sampler.expected == 12
    plain = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, noise_multiplier=1.0, per_device_train_batch_size=3, report_to=[]
    )
    assert plain.rate_for(24) == 3 / 24
    with pytest.raises(InputError, match="the data set has 24 rows"):
        trainer(tmp_path, expected_batch_size=25)


def test_delta_is_below_one_in_n_unless_given(tmp_path) -> None:
    assert trainer(tmp_path).delta == 24**-1.1
    assert trainer(tmp_path, target_delta=1e-6).delta == 1e-6


class Padding:
    def __call__(self, rows):
        raise AssertionError("never asked")


class PaddingFree(Padding):
    padding_free = True


class Packing(Padding):
    packing = True


class Positions(Padding):
    return_position_ids = True


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(rows())

    def __len__(self):
        return 24


TWICE = {"gradient_accumulation_kwargs": {"num_steps": 2}}
TRAPS = {
    "max_grad_norm": ("max_grad_norm=1.0", {"max_grad_norm": 1.0}),
    "accumulation": ("gradient_accumulation_steps=2", {"gradient_accumulation_steps": 2}),
    "accumulation by accelerate": ("gradient_accumulation_steps=2", {"accelerator_config": TWICE}),
    "group by length": ("train_sampling_strategy", {"train_sampling_strategy": "group_by_length"}),
    "sequential": ("train_sampling_strategy", {"train_sampling_strategy": "sequential"}),
    "label smoother": ("label_smoothing_factor=0.1", {"label_smoothing_factor": 0.1}),
    "auto_find_batch_size": ("auto_find_batch_size=True", {"auto_find_batch_size": True}),
    "debug": ("debug=.* looks at values", {"debug": "underflow_overflow"}),
    "liger": ("use_liger_kernel", {"use_liger_kernel": True}),
    "token counts": ("include_num_input_tokens_seen", {"include_num_input_tokens_seen": True}),
    "lomo": ("lomo", {"optim": "lomo"}),
    "layerwise": ("layerwise", {"optim": "galore_adamw_layerwise"}),
    "flattening": ("DataCollatorWithFlattening packs", {"data_collator": DataCollatorWithFlattening()}),
    "padding-free": ("PaddingFree packs", {"data_collator": PaddingFree()}),
    "packing": ("Packing packs", {"data_collator": Packing()}),
    "position ids": ("Positions packs", {"data_collator": Positions()}),
    "iterator": ("has no length", {"train_dataset": iter(rows())}),
    "stream": ("Stream has no length", {"train_dataset": Stream()}),
    "no rows": ("has no rows; ", {"train_dataset": []}),
    "DataParallel": ("wrapped in DataParallel", {"model": torch.nn.DataParallel(classifier())}),
    "compiled": ("wrapped in OptimizedModule", {"model": torch.compile(classifier(), backend="eager")}),
}


@pytest.mark.parametrize(("says", "given"), TRAPS.values(), ids=list(TRAPS))
def test_traps_are_refused_at_construction(tmp_path, says, given) -> None:
    with pytest.raises(InputError, match=says) as error:
        trainer(tmp_path, **given)
    assert ";" in str(error.value), "a refusal names the way out"
    assert not is_runtime_patched()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fp16", True),
        ("torch_compile", True),
        ("deepspeed", "zero.json"),
        ("fsdp", ["full_shard"]),
        ("parallelism_config", "tp"),
        ("_n_gpu", 2),
    ],
)
def test_traps_that_need_hardware_to_be_set(tmp_path, name, value) -> None:
    args = arguments(tmp_path)
    setattr(args, name, value)
    with pytest.raises(InputError, match="DataParallel" if name == "_n_gpu" else f"{name}="):
        DPTrainer(classifier(), args, train_dataset=rows())


@pytest.mark.parametrize("name", ["deepspeed", "fsdp", "fp16"])
def test_what_accelerate_was_launched_with_is_looked_at(tmp_path, monkeypatch, name) -> None:
    stock = DPTrainer.create_accelerator_and_postprocess

    def launched(self):
        stock(self)
        self.place_model_on_device = False
        if name == "fp16":
            monkeypatch.setattr(type(self.accelerator), "mixed_precision", property(lambda _: "fp16"))
        else:
            setattr(self, f"is_{name}_enabled", True)

    monkeypatch.setattr(DPTrainer, "create_accelerator_and_postprocess", launched)
    with pytest.raises(InputError, match=f"launched with {name}"):
        trainer(tmp_path)


def test_a_loss_over_the_batch_and_a_model_function_are_refused(tmp_path) -> None:
    args = arguments(tmp_path)
    with pytest.raises(InputError, match="override compute_per_example_loss"):
        DPTrainer(classifier(), args, train_dataset=rows(), compute_loss_func=lambda *given: None)

    class OfBatches(DPTrainer):
        def compute_loss(self, *given, **named):
            raise AssertionError("it would only be asked in evaluation")

    with pytest.raises(InputError, match="override compute_per_example_loss"):
        OfBatches(classifier(), args, train_dataset=rows())
    with pytest.raises(OptionTypeError, match="model_init is not taken"):
        DPTrainer(None, args, train_dataset=rows(), model_init=classifier)
    with pytest.raises(OptionTypeError, match=r"opake\.trainer\.TrainingArguments, got NoneType"):
        DPTrainer(classifier(), train_dataset=rows())
    with pytest.raises(InputError, match="without accounting"):
        DPTrainer(classifier(), args, train_dataset=rows()).hyperparameter_search()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("max_grad_norm", 1.0, "max_grad_norm=1.0"),
        ("gradient_accumulation_steps", 2, "gradient_accumulation_steps=2"),
        ("target_epsilon", 3.0, "either target_epsilon or noise_multiplier"),
        ("sampling_rate", 0.5, "say the same"),
    ],
)
def test_arguments_that_were_changed_are_looked_at_before_training(tmp_path, name, value, says) -> None:
    it = trainer(tmp_path)
    setattr(it.args, name, value)
    before = weights(it.model).clone()
    with pytest.raises(InputError, match=says):
        it.train()
    assert it.history.steps == 0
    assert torch.equal(weights(it.model), before)


def test_a_model_that_was_changed_is_looked_at_before_training(tmp_path) -> None:
    it = trainer(tmp_path)
    it.model.bfloat16()
    with pytest.raises(InputError, match=r"body.weight is trainable in torch.bfloat16"):
        it.train()


def test_models_that_cannot_be_trained_privately(tmp_path) -> None:
    with pytest.raises(InputError, match=r"body.weight is trainable in torch.bfloat16.*float32 adapters"):
        trainer(tmp_path, model=classifier().bfloat16())
    with pytest.raises(InputError, match="no parameter of Classifier is trainable"):
        trainer(tmp_path, model=classifier().requires_grad_(False))
    with pytest.raises(InputError, match="1 is a BatchNorm1d, which mixes rows; use GroupNorm"):
        trainer(tmp_path, model=torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)))
    with pytest.raises(UnsupportedModel, match="pass use_compat_patches=False"):
        trainer(tmp_path, use_compat_patches=True)
