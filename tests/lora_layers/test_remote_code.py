"""`trust_remote_code`: models whose code lies beside their weights, with it and without."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, dynamic_module_utils

from opake.checking.tiny import tiny_config
from opake.errors import AttentionClassNotFound
from opake.lora.axolotl import get_attention_cls_from_config, patch_self_attn_lora, restore

from .subjects import BATCH, fused, randomised

CONFIG = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own_llama"
"""
MODEL = """
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForCausalLM
from .configuration_own import OwnConfig

class OwnAttention(LlamaAttention):
    pass

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        for i, layer in enumerate(self.model.layers):
            layer.self_attn = OwnAttention(config, i)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkpoint of a tiny model with code of its own; the cache of such code is elsewhere for the test."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    made = tmp_path / "own_model"
    tiny_config("llama").save_pretrained(made)
    settings = json.loads((made / "config.json").read_text())
    settings |= {"model_type": "own_llama", "architectures": ["OwnForCausalLM"]}
    settings["auto_map"] = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    (made / "config.json").write_text(json.dumps(settings))
    (made / "configuration_own.py").write_text(CONFIG)
    (made / "modeling_own.py").write_text(MODEL)
    yield made
    restore()
    for name in set(sys.modules) - before:
        if name.startswith("transformers_modules"):
            del sys.modules[name]


def test_with_it_the_model_s_own_class_is_found_and_patched(folder: Path) -> None:
    cfg: dict[str, Any] = {"base_model": str(folder), "trust_remote_code": True}
    cls = get_attention_cls_from_config(cfg)
    assert (cls.__name__, cls.__module__.partition(".")[0]) == ("OwnAttention", "transformers_modules")
    patch_self_attn_lora(cfg)
    assert "forward" in vars(cls)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    assert any(type(module) is cls for module in model.modules())
    peft = randomised(
        get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM"))
    )
    assert fused(peft(**BATCH).loss) == {"qkv": config.num_hidden_layers, "w": config.num_hidden_layers}
    restore(cls)
    assert "forward" not in vars(cls)
    assert fused(peft(**BATCH).loss) == {}
    assert torch.isfinite(peft(**BATCH).loss)


@pytest.mark.parametrize("cfg", [{}, {"trust_remote_code": False}, {"trust_remote_code": None}])
def test_without_it_no_code_of_the_model_runs(cfg: dict[str, Any], folder: Path) -> None:
    for function in (get_attention_cls_from_config, patch_self_attn_lora):
        with pytest.raises(AttentionClassNotFound, match=r"(?s)config cannot be read.*trust_remote_code"):
            function({"base_model": str(folder), **cfg})
    assert not any(name.startswith("transformers_modules.own") for name in sys.modules)
