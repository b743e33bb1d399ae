"""A patched model is still a Transformers model: trainers, compilers, savers and exporters treat it as before.

Each test does the same with a patched and an unpatched model of the same weights. Kernels are switched on by name, and
run on a CPU as their plain twins.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from opake.checking.tiny import tiny_batch, tiny_model
from opake.collate import RightPaddingCollator
from opake.patches import apply_model_patches, restore

KERNELS = dict.fromkeys(("rope", "rms_norm", "activation", "cross_entropy"), True)
ROWS = [{"input_ids": list(range(3 + i % 5, 12 + i % 7))} for i in range(16)]


def needs(package: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@pytest.fixture
def stock() -> Any:
    return tiny_model("llama")


def patched(model: Any, **flags: Any) -> Any:
    """A copy with kernels alone: what a run without privacy wants."""
    model = copy.deepcopy(model)
    report = apply_model_patches(model, compat=False, **{**KERNELS, **flags})
    assert {row.flag for row in report.rows if row.state == "applied"} >= set(KERNELS)
    return model


def settings(where: Path, **more: Any) -> dict[str, Any]:
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    short = {"max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "seed": 0}
    here = {"use_cpu": True, "dataloader_pin_memory": False}
    return {"output_dir": str(where), **quiet, **short, **here, **more}


def assert_same_run(train: Callable[[Any], Any], stock: Any, other: Any) -> None:
    """Both models end with the same weights, and away from where they began."""
    before = {name: p.detach().clone() for name, p in stock.named_parameters()}
    losses = [
        [entry["loss"] for entry in train(model).state.log_history if "loss" in entry] for model in (stock, other)
    ]
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    ends = dict(other.named_parameters())
    moved = 0.0
    for name, p in stock.named_parameters():
        # AdamW divides by gradients: tiny ones make rounding visible
        torch.testing.assert_close(ends[name], p, rtol=1e-3, atol=2e-4)
        moved = max(moved, (p - before[name]).abs().max().item())
    assert moved > 1e-2


def test_the_trainer_of_transformers(stock: Any, tmp_path: Path) -> None:
    def train(model: Any) -> Trainer:
        collator = RightPaddingCollator(pad_token_id=0)
        arguments = TrainingArguments(**settings(tmp_path))
        trainer = Trainer(model, arguments, train_dataset=ROWS, data_collator=collator)  # type: ignore[arg-type]
        trainer.train()
        return trainer

    assert_same_run(train, stock, patched(stock))


# dill warns about a class of pyarrow while the data set is fingerprinted
@needs("datasets")
@pytest.mark.filterwarnings("ignore:Cannot (locate|pickle) ")
def test_a_data_set_of_datasets(stock: Any, tmp_path: Path) -> None:
    from datasets import Dataset

    def train(model: Any) -> Trainer:
        collator = RightPaddingCollator(pad_token_id=0)
        arguments = TrainingArguments(**settings(tmp_path))
        trainer = Trainer(model, arguments, train_dataset=Dataset.from_list(ROWS), data_collator=collator)
        trainer.train()
        return trainer

    assert_same_run(train, stock, patched(stock))


# and trl sets what newer Transformers have renamed
@needs("trl")
@pytest.mark.filterwarnings("ignore:Cannot (locate|pickle) ", "ignore:`gradient_checkpointing` is deprecated")
def test_the_sft_trainer_of_trl(stock: Any, tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    def train(model: Any) -> Any:
        arguments = SFTConfig(
            **settings(tmp_path, bf16=False, max_length=16, dataset_kwargs={"skip_prepare_dataset": True})
        )
        trainer = SFTTrainer(model, arguments, train_dataset=Dataset.from_list(ROWS), processing_class=tokenizer())
        trainer.train()
        return trainer

    assert_same_run(train, stock, patched(stock))


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 2, "<unk>": 1}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def test_accelerate(stock: Any) -> None:
    accelerator, batch = Accelerator(cpu=True), tiny_batch()
    ends = []
    for model in (stock, patched(stock)):
        ready, optimiser = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.backward(ready(**batch).loss)
        optimiser.step()
        ends.append(accelerator.get_state_dict(ready))
        assert accelerator.unwrap_model(ready) is model
    assert ends[0].keys() == ends[1].keys()
    for name in ends[0]:
        torch.testing.assert_close(ends[0][name], ends[1][name], rtol=1e-4, atol=1e-5)


COMPILE = """
import sys, torch
from opake.checking.tiny import tiny_batch, tiny_model
from opake.patches import apply_model_patches, patch_report, restore

stock, model, batch = tiny_model("llama"), tiny_model("llama"), tiny_batch(padding="none")
apply_model_patches(model, compat=sys.argv[1] == "True", rope=True, rms_norm=True, activation=True, cross_entropy=True)
compiled = torch.compile(model, backend="aot_eager", fullgraph=sys.argv[1] == "False")
for _ in range(2):
    found = torch.autograd.grad(compiled(**batch).loss, list(model.parameters()))
wanted = torch.autograd.grad(stock(**batch).loss, list(stock.parameters()))
for a, b in zip(found, wanted):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
assert patch_report(compiled) is not None
restore(compiled)
assert "_opake" not in vars(model)
"""


@pytest.mark.parametrize("compat", [True, False])
def test_torch_compile(compat: bool) -> None:
    """Kernels alone compile into one graph; the attention and masks that vmap needs break it, and stay right."""
    # in a process of its own: what the compiler keeps depends on everything that it has compiled before
    done = subprocess.run([sys.executable, "-c", COMPILE, str(compat)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def digest(where: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(where.iterdir())}


def test_what_is_saved_is_what_an_unpatched_model_saves(stock: Any, tmp_path: Path) -> None:
    model = copy.deepcopy(stock)
    apply_model_patches(model, **KERNELS)
    stock.save_pretrained(tmp_path / "stock")
    model.save_pretrained(tmp_path / "patched")
    assert digest(tmp_path / "patched") == digest(tmp_path / "stock")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "patched")
    assert again.config._attn_implementation == stock.config._attn_implementation
    for name, p in again.named_parameters():
        assert torch.equal(p, stock.get_parameter(name))


def test_safetensors(stock: Any, tmp_path: Path) -> None:
    model = patched(stock)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors")
    assert list(loaded) == sorted(stock.state_dict())
    restored = tiny_model("llama", seed=1)
    apply_model_patches(restored)
    restored.load_state_dict(loaded)
    torch.testing.assert_close(restored(**tiny_batch()).loss, stock(**tiny_batch()).loss)


def adapted(model: Any) -> Any:
    options = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    with warnings.catch_warnings():
        # PEFT looks up the class of the base model, which is in no package of the hub
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return get_peft_model(copy.deepcopy(model), options)


def test_adapters_saved_from_a_patched_model_load_into_an_unpatched_one(stock: Any, tmp_path: Path) -> None:
    model, plain = adapted(stock), adapted(stock)
    apply_model_patches(model, **KERNELS)
    with warnings.catch_warnings():
        # PEFT wants to compare the vocabulary with that of a base model on the hub
        warnings.simplefilter("ignore")
        plain.save_pretrained(tmp_path / "plain")
        model.save_pretrained(tmp_path / "patched")
    assert digest(tmp_path / "patched") == digest(tmp_path / "plain")
    loaded = PeftModel.from_pretrained(copy.deepcopy(stock), str(tmp_path / "patched"))
    batch = tiny_batch()
    torch.testing.assert_close(loaded(**batch).logits, plain(**batch).logits)
    torch.testing.assert_close(model(**batch).logits, plain(**batch).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compat", [True, False])
def test_an_inference_engine_takes_the_weights_as_they_are(stock: Any, compat: bool) -> None:
    """Engines read names, shapes, dtypes and storage while training goes on, and adapters merged into the base."""

    def exported(model: Any) -> list[tuple[Any, ...]]:
        return [(name, p.shape, p.dtype, p.stride(), p.data_ptr(), type(p)) for name, p in model.named_parameters()]

    before = exported(stock)
    apply_model_patches(stock, compat=compat, **KERNELS)
    stock(**tiny_batch()).loss.backward()
    assert exported(stock) == before
    restore(stock)

    model, plain = adapted(stock), adapted(stock)
    apply_model_patches(model, compat=compat, **KERNELS)
    merged, wanted = model.merge_and_unload(), plain.merge_and_unload()
    assert list(merged.state_dict()) == list(wanted.state_dict())
    for name, value in wanted.state_dict().items():
        assert torch.equal(merged.state_dict()[name], value)
