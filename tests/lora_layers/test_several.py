"""Models with adapters at several places: on a part, on a shared layer, PEFT's, on a layer that is no model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from opake.checking.tiny import tiny_model
from opake.errors import InputError, UnsupportedModel
from opake.lora import (
    AdapterWrapper,
    LoRALinear,
    apply_lora,
    disable_adapter,
    load_peft_adapter,
    merge_lora,
    remove_lora,
    save_peft_adapter,
)
from opake.testing.snapshot import differences, model_snapshot

from .subjects import BATCH, double_model, randomised


@pytest.mark.parametrize("end", [remove_lora, merge_lora])
@pytest.mark.parametrize("part", ["model", "model.layers.0"])
def test_adapters_of_a_part_end_with_those_of_the_whole(part: str, end: Any) -> None:
    model = tiny_model("llama")
    before, states = model_snapshot(model), [p.requires_grad for p in model.parameters()]
    apply_lora(model.get_submodule(part), "q_proj")
    apply_lora(model, "v_proj")
    end(model)
    assert list(differences(before, model_snapshot(model))) == []
    assert [p.requires_grad for p in model.parameters()] == states


def test_a_part_is_ended_alone() -> None:
    model = randomised(apply_lora(double_model("llama"), "q_proj"))
    want = model.model.layers[1].self_attn.q_proj
    remove_lora(model.model.layers[0])
    assert [module for module in model.modules() if isinstance(module, AdapterWrapper)] == [want]
    with disable_adapter(model):
        assert torch.equal(model(**BATCH).logits, double_model("llama")(**BATCH).logits)


def test_a_shared_layer_is_not_half_excluded() -> None:
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.Linear(4, 4))})
    with pytest.raises(InputError, match=r"b\.0 is excluded and is the same layer as a; exclude both or neither"):
        apply_lora(model, exclude="b.0")
    assert model["a"] is shared
    apply_lora(model, exclude=["a", "b.0"])
    assert model["a"] is shared
    assert isinstance(model["b"][1], LoRALinear)


@pytest.mark.parametrize("call", [remove_lora, merge_lora, lambda m: disable_adapter(m).__enter__()])
def test_adapters_of_peft_are_its_own_business(call: Any) -> None:
    model = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    before = model_snapshot(model)
    with pytest.raises(UnsupportedModel, match=r"adapters of this .* are PEFT's; use its own model\.disable_adapter"):
        call(model)
    assert list(differences(before, model_snapshot(model))) == []


def test_what_is_no_model_and_what_is_no_more_than_a_layer(tmp_path: Path) -> None:
    for call in (
        remove_lora,
        merge_lora,
        lambda m: disable_adapter(m).__enter__(),
        lambda m: save_peft_adapter(m, "x"),
    ):
        with pytest.raises(UnsupportedModel, match="expected a model"):
            call(3)
    with pytest.raises(
        InputError, match=r"it holds no linear layer. A single layer is wrapped by LoRALinear\(layer, Lin"
    ):
        apply_lora(nn.Linear(4, 4))


def test_a_model_without_values_loads_and_saves_no_adapter(tmp_path: Path) -> None:
    saved = randomised(apply_lora(tiny_model("llama"), "q_proj"))
    save_peft_adapter(saved, tmp_path)
    empty = tiny_model("llama").to("meta")
    before = model_snapshot(copy.copy(empty))
    with pytest.raises(InputError, match=r"q_proj is on the meta device, where an adapter would have no values"):
        load_peft_adapter(empty, tmp_path)
    assert list(differences(before, model_snapshot(empty))) == []
    with pytest.raises(InputError, match="has no values to save"):
        save_peft_adapter(apply_lora(empty, "q_proj"), tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with torch.no_grad():
        empty.load_state_dict(saved.state_dict(), assign=True)
    save_peft_adapter(empty, tmp_path / "new")


def test_switches_are_true_or_false(tmp_path: Path) -> None:
    bare, model = tiny_model("llama"), apply_lora(tiny_model("llama"), "q_proj")
    odd: Any = "no"
    with pytest.raises(InputError, match="canonical='no' is a str; it takes True or False"):
        load_peft_adapter(bare, tmp_path, canonical=odd)
    with pytest.raises(InputError, match="for_peft='no' is a str; it takes True or False"):
        save_peft_adapter(model, tmp_path, for_peft=odd)
    assert list(tmp_path.iterdir()) == []
