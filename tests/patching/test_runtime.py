"""The process-wide patches: exactly the listed names, idempotent, and gone after `restore_runtime`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
import torch.utils.checkpoint
import transformers
from torch.func import grad, vmap
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    LlamaConfig,
    LlamaForCausalLM,
    default_data_collator,
)
from transformers.data.data_collator import DataCollatorForLanguageModeling, DefaultDataCollator

from opake.errors import RestoreConflict, UnknownOption
from opake.patches import apply_model_patches, apply_runtime_patches, is_runtime_patched, restore_runtime

IDS = torch.arange(12).reshape(2, 6)
LLAMA = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    restore_runtime()
    yield
    restore_runtime()


def names() -> dict[str, object]:
    """Every attribute of every imported Transformers, PEFT and torch.utils.checkpoint module, and of their classes."""
    found: dict[str, object] = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in ("transformers", "peft") and name != "torch.utils.checkpoint":
            continue
        for key, value in list(vars(module).items()):
            if key == "__warningregistry__":
                continue
            found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                found.update({f"{name}.{value.__qualname__}.{k}": v for k, v in vars(value).items()})
    return found


def changed(before: dict[str, object], after: dict[str, object]) -> set[str]:
    return {name for name in before if before[name] is not after.get(name)}


def test_exactly_the_listed_names_differ() -> None:
    # importing everything that the patches touch first, so that only patches can make a difference
    apply_runtime_patches()
    restore_runtime()
    before = names()
    report = apply_runtime_patches()
    assert changed(before, names()) == {row.site for row in report.find(state="applied")}
    assert is_runtime_patched()
    again = apply_runtime_patches()
    assert {row.site for row in again.find(state="already")} == {row.site for row in report.find(state="applied")}
    restore_runtime()
    assert changed(before, names()) == set()
    assert not is_runtime_patched()


def test_flags_switch_records() -> None:
    report = apply_runtime_patches(vmap_checkpointing=False, kv_cache=False, compat=True)
    assert report.find(flag="vmap_checkpointing")[0].state == "off"
    assert "not in this scope" in report.find(flag="kv_cache")[0].reason
    assert not hasattr(torch.utils.checkpoint.checkpoint, "__wrapped__") or not is_guarded()
    restore_runtime()
    assert apply_runtime_patches(compat=False).find(state="applied") == ()
    with pytest.raises(UnknownOption, match="did you mean vmap_checkpointing"):
        apply_runtime_patches(vmap_checkpoint=False)


def is_guarded() -> bool:
    return torch.utils.checkpoint.checkpoint.__qualname__ != transformers.modeling_utils.checkpoint.__qualname__


@pytest.mark.parametrize("first", [True, False], ids=["built before", "built after"])
def test_unrelated_models_compute_the_same(first: bool) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**LLAMA)
    state = LlamaForCausalLM(config).state_dict()

    def build() -> LlamaForCausalLM:
        model = LlamaForCausalLM(config)
        model.load_state_dict(state)
        return model.eval()

    stock = build()
    tokens = stock.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    loss = stock(IDS, labels=IDS, position_ids=torch.arange(6).expand(2, 6)).loss
    early = build()
    apply_runtime_patches()
    model = early if first else build()
    assert torch.equal(model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0), tokens)
    assert torch.equal(model(IDS, labels=IDS, position_ids=torch.arange(6).expand(2, 6)).loss, loss)


def test_packed_rows_of_unrelated_models_are_still_found() -> None:
    apply_runtime_patches()
    model = LlamaForCausalLM(LlamaConfig(**LLAMA)).eval()
    packed = torch.tensor([[0, 1, 2, 0, 1, 2]])
    alone = model(IDS[:1, 3:], use_cache=False).logits
    both = model(IDS[:1], position_ids=packed, use_cache=False).logits
    assert torch.allclose(both[:, 3:], alone, atol=1e-5)


def test_position_ids_per_row_without_a_mask() -> None:
    for runtime in (False, True):
        if runtime:
            apply_runtime_patches()
        model = LlamaForCausalLM(LlamaConfig(**LLAMA))
        apply_model_patches(model)
        params = {name: p.detach() for name, p in model.named_parameters()}

        def loss(p: dict, ids: torch.Tensor, positions: torch.Tensor, model=model) -> torch.Tensor:
            call = {"input_ids": ids, "labels": ids, "position_ids": positions}
            return torch.func.functional_call(model, p, (), call).loss

        positions = torch.stack([torch.arange(6), torch.arange(2, 8)])
        got = vmap(grad(loss), (None, 0, 0))(params, IDS, positions)
        for i in range(2):
            stock = model(IDS[i : i + 1], labels=IDS[i : i + 1], position_ids=positions[i : i + 1]).loss
            for (name, p), expected in zip(
                params.items(), torch.autograd.grad(stock, list(model.parameters())), strict=True
            ):
                del p
                assert torch.allclose(got[name][i], expected, atol=1e-6)


class Tokenizer:
    """As much of a tokenizer as the collators read for an empty list."""

    model_input_names = ("input_ids", "token_type_ids", "attention_mask")
    pad_token_id = 0
    mask_token = "[MASK]"
    mask_token_id = 1
    padding_side = "right"


@pytest.mark.parametrize(
    ("build", "labels"),
    [
        (lambda: DataCollatorWithPadding(Tokenizer()), False),
        (lambda: DataCollatorForSeq2Seq(Tokenizer()), True),
        (lambda: DataCollatorForLanguageModeling(Tokenizer(), mlm=False), True),
    ],
)
def test_collators_take_an_empty_list(build, labels: bool) -> None:
    collator = build()
    with pytest.raises((IndexError, AttributeError, ValueError, TypeError)):
        collator([])
    apply_runtime_patches()
    batch = collator([])
    assert set(batch) == {*Tokenizer.model_input_names, *(["labels"] if labels else [])}
    assert all(value.shape == (0, 0) and value.dtype == torch.long for value in batch.values())


def test_default_collators() -> None:
    row = {"input_ids": [1, 2, 3], "label": 1}
    expected = DefaultDataCollator()([row])
    apply_runtime_patches()
    # Transformers puts a second module in the place of itself when parts of it are imported
    module = sys.modules["transformers"]
    assert module.default_data_collator is not default_data_collator
    assert set(module.default_data_collator([])) == {"input_ids", "attention_mask", "labels"}
    assert set(DefaultDataCollator()([])) == {"input_ids", "attention_mask", "labels"}
    found = DefaultDataCollator()([row])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_checkpoint_by_name_inside_a_transform() -> None:
    layer = torch.nn.Linear(3, 3)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sin().sum()

    x = torch.randn(4, 3)
    # torch 2.11 says what it cannot map, newer ones why
    with pytest.raises(RuntimeError, match=r"saved tensor hooks|_NoopSaveInputs"):
        vmap(grad(loss))(x)
    expected = vmap(grad(lambda row: layer(row).sin().sum()))(x)
    apply_runtime_patches()
    assert torch.allclose(vmap(grad(loss))(x), expected)


def test_names_replaced_by_others_are_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    apply_runtime_patches()
    with monkeypatch.context() as patch:
        patch.setattr(torch.utils.checkpoint, "checkpoint", len)
        with pytest.raises(RestoreConflict, match=r"torch.utils.checkpoint.checkpoint"):
            restore_runtime()
        assert is_runtime_patched()
    restore_runtime()


def test_encoder_generates_no_surprise() -> None:
    apply_runtime_patches()
    model = BertForMaskedLM(
        BertConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    ).eval()
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    assert torch.isfinite(model(IDS, attention_mask=mask).logits).all()
