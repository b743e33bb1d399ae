"""PEFT checkpoints written and read: same outputs, same keys, both ways; what cannot be said is an error."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

from opake.errors import InputError, UnsupportedModel
from opake.functional import per_example_grads
from opake.lora import CanonicalAdapter, apply_lora, load_peft_adapter, remove_lora, save_peft_adapter
from opake.testing.oracle import relative_error
from opake.testing.snapshot import differences, model_snapshot

from .subjects import BATCH, double_model, patch, randomised, trainable

# PEFT looks for the config of a model that has no name
pytestmark = pytest.mark.filterwarnings("ignore:Could not find a config file in:UserWarning")
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
ROUTERS = re.compile(r".*\.(gate|router)")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "ranks and scales": (
        "llama",
        {"targets": ["q_proj", "down_proj"], "dim": 4, "alpha": 6, "dim_pattern": {"layers.1.*": 3}},
    ),
    "scales": ("qwen2", {"targets": "all-linear", "alpha_pattern": {"layers.0.*.k_proj": 2.5}}),
    "head": ("llama", {"targets": ["lm_head", "v_proj"]}),
    "dropout": ("llama", {"dropout": 0.25}),
    "gpt2": ("gpt2", {}),
    "phi3": ("phi3", {}),
    "canonical phi3": ("phi3", {"canonical": True}),
    "canonical parts": ("phi3", {"targets": ["q_proj", "v_proj", "up_proj", "o_proj"], "canonical": True}),
    "canonical ranks": ("gpt2", {"targets": "c_attn", "canonical": True, "dim_pattern": {"k_proj": 2}}),
    "mixtral router": ("mixtral", {"targets": ["gate", "q_proj"]}),
    "router alone": ("qwen3_moe", {"targets": ROUTERS}),
    "float32 router": ("deepseek_v3", {"targets": ROUTERS}),
    "linear router": ("llama4_text", {"targets": ["router", "q_proj"]}),
    "sparsemixer router": ("phimoe", {"targets": ["router", "q_proj"]}),
    "inner router": ("hunyuan_v1_moe", {"targets": ["gate", "q_proj"]}),
}


def ours(name: str) -> tuple[Any, Any]:
    """(bare model, model with random adapters), in eval mode: dropout and jitter off."""
    model_type, choices = CASES[name]
    base = double_model(model_type).eval()
    return base, randomised(apply_lora(deepcopy(base), **{"targets": "all-linear", **choices}))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**BATCH).logits


# PEFT on an adapter of the head, and on the biases that it has just written
REMARKS = ("ignore:Setting `save_embedding_layers`:UserWarning", "ignore:Adapter 'default'.*invalid shape")


@pytest.mark.filterwarnings(REMARKS[0])
@pytest.mark.parametrize("name", CASES)
def test_peft_reads_what_is_written(name: str, tmp_path: Path) -> None:
    base, model = ours(name)
    save_peft_adapter(model, tmp_path)
    if name == "float32 router" and isinstance(base.model.layers[1].mlp.gate(torch.zeros(1, 1, 32)), torch.Tensor):
        pytest.skip("PEFT hides the attributes of this router from the block that reads them")
    peft = PeftModel.from_pretrained(deepcopy(base), tmp_path).double().eval()
    assert type(peft).__name__ == "PeftModelForCausalLM"
    # routers in float32 add their term before or after a rounding
    torch.testing.assert_close(logits(peft), logits(model), rtol=1e-6, atol=1e-6)
    peft.save_pretrained(tmp_path / "again")
    first, again = (load_file(folder / WEIGHTS) for folder in (tmp_path, tmp_path / "again"))
    # PEFT adds the head itself where it is adapted
    assert first.keys() == {key for key in again if ".base_layer." not in key}
    assert all(torch.equal(first[key], again[key]) for key in first)


@pytest.mark.parametrize("name", CASES)
def test_the_round_trip_loses_nothing(name: str, tmp_path: Path) -> None:
    base, model = ours(name)
    save_peft_adapter(model, tmp_path)
    canonical = bool(CASES[name][1].get("canonical"))
    other = load_peft_adapter(deepcopy(base), tmp_path, canonical=canonical).eval()
    assert list(other.state_dict()) == list(model.state_dict())
    if name != "canonical ranks":
        for key, tensor in model.state_dict().items():
            assert torch.equal(other.state_dict()[key], tensor), key
        assert torch.equal(logits(other), logits(model))
    # parts of different scales are written with the scale of one, their values multiplied
    torch.testing.assert_close(logits(other), logits(model))
    assert set(trainable(other)) == set(trainable(model))
    # one adapter over a combined layer, or one for each part, from the same file
    swapped = load_peft_adapter(deepcopy(base), tmp_path, canonical=not canonical).eval()
    torch.testing.assert_close(logits(swapped), logits(model), rtol=1e-9, atol=1e-9)


PEFT: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"target_modules": "all-linear"}),
    "rslora": ("llama", {"target_modules": ["q_proj", "up_proj"], "use_rslora": True, "r": 5, "lora_alpha": 7}),
    "patterns": (
        "qwen2",
        {
            "target_modules": ["q_proj", "k_proj"],
            "rank_pattern": {"k_proj": 2},
            "alpha_pattern": {r"layers\.1\.self_attn\.q_proj": 3},
        },
    ),
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
    "phi3": ("phi3", {"target_modules": "all-linear"}),
    "router": ("mixtral", {"target_modules": ["gate", "v_proj"]}),
    "target parameters": ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]}),
    "one layer": ("llama", {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
    "dropout": ("llama", {"target_modules": ["o_proj"], "lora_dropout": 0.5}),
    "head": ("llama", {"target_modules": ["lm_head", "v_proj"]}),
}


@pytest.mark.filterwarnings(REMARKS[0])
@pytest.mark.parametrize(
    ("name", "canonical"), [*((name, False) for name in PEFT), ("gpt2", True), ("phi3", True), ("llama", True)]
)
def test_what_peft_writes_is_read(name: str, canonical: bool, tmp_path: Path) -> None:
    model_type, options = PEFT[name]
    base = double_model(model_type).eval()
    config = LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM", **options})
    peft = randomised(get_peft_model(deepcopy(base), config)).double().eval()
    peft.save_pretrained(tmp_path)
    model = load_peft_adapter(deepcopy(base), tmp_path, canonical=canonical).eval()
    torch.testing.assert_close(logits(model), logits(peft), rtol=1e-6, atol=1e-6)
    split = any(isinstance(module, CanonicalAdapter) for module in model.modules())
    assert split == (canonical and model_type in ("gpt2", "phi3"))
    save_peft_adapter(model, tmp_path / "again")
    again = PeftModel.from_pretrained(deepcopy(base), tmp_path / "again").double().eval()
    torch.testing.assert_close(logits(again), logits(peft), rtol=1e-6, atol=1e-6)
    if not split:
        first, second = (load_file(folder / WEIGHTS) for folder in (tmp_path, tmp_path / "again"))
        first = {key: tensor for key, tensor in first.items() if ".base_layer." not in key}
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", ["llama", "rslora", "patterns", "gpt2", "phi3"])
def test_per_example_gradients_are_those_of_peft(name: str, tmp_path: Path) -> None:
    model_type, options = PEFT[name]
    base = double_model(model_type)
    config = LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM", **options})
    peft = randomised(get_peft_model(deepcopy(base), config)).double()
    peft.save_pretrained(tmp_path)
    model = load_peft_adapter(base, tmp_path)
    patch(model)
    patch(peft)
    got, want = (per_example_grads(each, engine="vmap")(trainable(each), **BATCH) for each in (model, peft))
    for ours_, theirs in {"linear_in": "lora_A.default", "linear_out": "lora_B.default"}.items():
        got = {name.replace(f".adapter.{ours_}.", f".{theirs}."): g for name, g in got.items()}
    assert relative_error({f"base_model.model.{name}": g for name, g in got.items()}, want) < 1e-9


def test_dropout_is_kept_or_replaced(tmp_path: Path) -> None:
    base, model = ours("dropout")
    save_peft_adapter(model, tmp_path)
    assert json.loads((tmp_path / CONFIG).read_text())["lora_dropout"] == 0.25
    p = {m.p for m in load_peft_adapter(deepcopy(base), tmp_path).modules() if isinstance(m, nn.Dropout)}
    assert p == {0.25}
    bare = load_peft_adapter(deepcopy(base), tmp_path, dropout=0.0)
    assert not any(isinstance(m, nn.Dropout) and m.p for m in bare.modules())


def test_values_keep_their_dtype(tmp_path: Path) -> None:
    base = double_model("llama").bfloat16()
    model = randomised(apply_lora(deepcopy(base), "q_proj", lora_dtype=torch.float32))
    save_peft_adapter(model, tmp_path)
    assert {t.dtype for t in load_file(tmp_path / WEIGHTS).values()} == {torch.float32}
    other = load_peft_adapter(deepcopy(base), tmp_path)
    assert {p.dtype for p in trainable(other).values()} == {torch.float32}
    assert torch.equal(logits(other), logits(model))


def test_the_config_says_what_it_is_for(tmp_path: Path) -> None:
    _, model = ours("llama")
    save_peft_adapter(model, tmp_path, base_model_name_or_path="some/model", task_type="FEATURE_EXTRACTION")
    config = json.loads((tmp_path / CONFIG).read_text())
    assert (config["base_model_name_or_path"], config["task_type"]) == ("some/model", "FEATURE_EXTRACTION")
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["bias"]) == ("LORA", 8, 32, "none")


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"dropout": 0.1, "dropout_position": "post"}, "drop out its output"),
        ({"targets": ["gate"], "dropout": 0.1, "model_type": "mixtral"}, "no dropout for routers"),
    ],
)
def test_what_peft_has_no_word_for_is_not_written(choices: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = apply_lora(double_model(choices.pop("model_type", "llama")), **choices)
    with pytest.raises(InputError, match=message):
        save_peft_adapter(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_different_dropouts_and_no_adapters_are_not_written(tmp_path: Path) -> None:
    model = double_model("llama")
    with pytest.raises(InputError, match="no adapters"):
        save_peft_adapter(model, tmp_path)
    apply_lora(apply_lora(model, "q_proj", dropout=0.1), "v_proj")
    with pytest.raises(InputError, match="one dropout for all layers"):
        save_peft_adapter(model, tmp_path)
    assert list(tmp_path.iterdir()) == []


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "use_dora=True"),
    "lora_bias": ({"lora_bias": True}, "lora_bias=True"),
    "bias": ({"bias": "lora_only"}, "bias='lora_only'"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "tokens": ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
    "embedding": ({"target_modules": ["embed_tokens"]}, "more than plain LoRA weights"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings(*REMARKS)
def test_more_than_plain_lora_is_refused(name: str, tmp_path: Path) -> None:
    options, message = REFUSED[name]
    config = LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM", "target_modules": ["q_proj"], **options})
    get_peft_model(double_model("qwen2"), config).save_pretrained(tmp_path)
    model = double_model("qwen2")
    before = model_snapshot(model)
    with pytest.raises(InputError, match=message):
        load_peft_adapter(model, tmp_path)
    assert list(differences(before, model_snapshot(model))) == []


def test_stacked_experts_are_refused(tmp_path: Path) -> None:
    config = LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj"], target_parameters=["experts.down_proj"])
    get_peft_model(double_model("mixtral"), config).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="stacked experts"):
        load_peft_adapter(double_model("mixtral"), tmp_path)


def test_other_models_and_broken_files(tmp_path: Path) -> None:
    base, model = ours("llama")
    save_peft_adapter(model, tmp_path)
    with pytest.raises(InputError, match=r"GPT2LMHeadModel has no model\.layers"):
        load_peft_adapter(double_model("gpt2"), tmp_path)
    with pytest.raises(InputError, match="has an adapter already"):
        load_peft_adapter(model, tmp_path)
    with pytest.raises(InputError, match=r"there is no adapter_config\.json"):
        load_peft_adapter(base, tmp_path / "elsewhere")
    tensors = load_file(tmp_path / WEIGHTS)
    key = next(key for key in tensors if "lora_A" in key)
    save_file({k: t for k, t in tensors.items() if k != key}, tmp_path / WEIGHTS)
    with pytest.raises(InputError, match="one of lora_A and lora_B alone"):
        load_peft_adapter(base, tmp_path)
    save_file({**tensors, key: torch.zeros(8, 33)}, tmp_path / WEIGHTS)
    before = model_snapshot(base)
    with pytest.raises(InputError, match="maps 48 to 32"):
        load_peft_adapter(base, tmp_path)
    assert list(differences(before, model_snapshot(base))) == []
    with pytest.raises(UnsupportedModel):
        load_peft_adapter(get_peft_model(base, LoraConfig(target_modules=["q_proj"])), tmp_path)


@pytest.mark.filterwarnings(REMARKS[0])
def test_another_head_in_the_checkpoint_is_named(tmp_path: Path) -> None:
    config = LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["lm_head"])
    base = double_model("llama")
    get_peft_model(deepcopy(base), config).save_pretrained(tmp_path)
    nn.init.zeros_(base.lm_head.weight)
    with pytest.raises(InputError, match=r"brings a lm_head\.weight of its own"):
        load_peft_adapter(base, tmp_path)


def test_off_and_on_again(tmp_path: Path) -> None:
    _, model = ours("llama")
    want = logits(model)
    save_peft_adapter(model, tmp_path)
    remove_lora(model)
    assert not torch.allclose(logits(model), want)
    assert torch.equal(logits(load_peft_adapter(model, tmp_path)), want)
