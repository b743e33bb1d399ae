"""Targets that PEFT reads as something else in a mixture of experts are not written for it."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from opake.errors import InputError
from opake.lora import apply_lora, load_peft_adapter, peft_rewrites, save_peft_adapter

from .subjects import BATCH, double_model, randomised

pytestmark = pytest.mark.filterwarnings("ignore:Could not find a config file in:UserWarning")
SHARED = [f"shared_experts.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
# model type, targets, config
REWRITTEN: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "everything": ("deepseek_v3", "all-linear", {"first_k_dense_replace": 1}),
    "shared experts": ("deepseek_v3", SHARED, {}),
    "half a stack": ("deepseek_v3", ["shared_experts.up_proj"], {}),
    "down alone": ("deepseek_v3", ["shared_experts.down_proj", "o_proj"], {}),
    "dense layer": ("qwen3_moe", ["layers.0.mlp.down_proj", "q_proj"], {"mlp_only_layers": [0]}),
    "dense layer of DeepSeek": ("deepseek_v3", ["layers.0.mlp.up_proj"], {"first_k_dense_replace": 1}),
}
READ: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "attention": ("deepseek_v3", ["kv_b_proj", "o_proj"], {}),
    "a shared expert that PEFT leaves alone": ("qwen2_moe", "shared_expert.up_proj", {}),
    "router": ("qwen2_moe", ["mlp.gate", "v_proj"], {}),
    "gate of the shared expert": ("qwen2_moe", ["shared_expert_gate"], {}),
    "mixtral": ("mixtral", "all-linear", {}),
    "dense": ("llama", "all-linear", {}),
}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**BATCH).logits


def adapted(model_type: str, targets: Any, config: dict[str, Any]) -> tuple[Any, Any]:
    base = double_model(model_type, **config).eval()
    return base, randomised(apply_lora(deepcopy(base), targets))


@pytest.mark.parametrize("name", REWRITTEN)
def test_what_peft_reads_as_experts_is_not_written_for_it(name: str, tmp_path: Path) -> None:
    base, model = adapted(*REWRITTEN[name])
    with pytest.raises(InputError, match=r"PEFT reads .*_proj.* as names of stacked experts.*for_peft=False"):
        save_peft_adapter(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    # as the message says: exact for us
    save_peft_adapter(model, tmp_path, for_peft=False)
    assert torch.equal(logits(load_peft_adapter(deepcopy(base), tmp_path)), logits(model))


@pytest.mark.filterwarnings(
    "ignore:Found missing adapter keys:UserWarning", "ignore:The following (rank|alpha)_pattern keys"
)
@pytest.mark.parametrize("name", ["shared experts", "down alone", "dense layer"])
def test_peft_would_compute_something_else(name: str, tmp_path: Path) -> None:
    base, model = adapted(*REWRITTEN[name])
    save_peft_adapter(model, tmp_path, for_peft=False)
    try:
        got = logits(PeftModel.from_pretrained(deepcopy(base), tmp_path).double())
    except (RuntimeError, ValueError):
        return
    assert not torch.allclose(got, logits(model)), "refused without need"


@pytest.mark.parametrize("name", READ)
def test_what_peft_reads_as_it_stands_is_written(name: str, tmp_path: Path) -> None:
    base, model = adapted(*READ[name])
    save_peft_adapter(model, tmp_path)
    peft = PeftModel.from_pretrained(deepcopy(base), tmp_path).double()
    torch.testing.assert_close(logits(peft), logits(model), rtol=1e-6, atol=1e-6)


def test_without_peft_nothing_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, model = adapted(*REWRITTEN["shared experts"])
    monkeypatch.setattr(peft_rewrites.importlib.util, "find_spec", lambda name: None)
    save_peft_adapter(model, tmp_path)
    assert (tmp_path / "adapter_config.json").exists()
