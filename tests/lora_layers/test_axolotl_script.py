"""A training script written for axolotl's documented functions runs unchanged but for the line that imports them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from opake.checking.tiny import tiny_model
from opake.lora.axolotl import restore

from .subjects import BATCH

AXOLOTL = "from axolotl.monkeypatch.lora_kernels import"
OPAKE = "from opake.lora.axolotl import"
SCRIPT = '''
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from axolotl.monkeypatch.lora_kernels import (
    apply_lora_kernel_patches,
    get_attention_cls_from_config,
    original_apply_o,
    original_apply_qkv,
    patch_self_attn_lora,
)

class DictDefault(dict):
    """As axolotl's config: attributes are keys, and None where there is none."""
    __getattr__ = dict.get

cfg = DictDefault(
    base_model=BASE_MODEL,
    adapter="lora",
    lora_r=4,
    lora_dropout=0.0,
    lora_mlp_kernel=True,
    lora_qkv_kernel=True,
    lora_o_kernel=True,
)

attention_cls = get_attention_cls_from_config(cfg)
if cfg.lora_qkv_kernel or cfg.lora_o_kernel:
    patch_self_attn_lora(cfg)

model = AutoModelForCausalLM.from_pretrained(cfg.base_model)
attention = next(module for module in model.modules() if isinstance(module, attention_cls))
stock = None
if hasattr(attention, "q_proj"):
    hidden = torch.ones(1, 3, model.config.hidden_size)
    stock = [*original_apply_qkv(attention, hidden), original_apply_o(attention, hidden)]

config = LoraConfig(r=cfg.lora_r, lora_dropout=cfg.lora_dropout, target_modules="all-linear", task_type="CAUSAL_LM")
model = get_peft_model(model, config)
model = apply_lora_kernel_patches(model, cfg)
try:
    apply_lora_kernel_patches(model.base_model.model, cfg)
    refused = None
except TypeError as error:
    refused = error

optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
losses = []
for _ in range(5):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
'''


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    yield
    restore()


def run(script: str, folder: Path) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "script", "BASE_MODEL": str(folder), "batch": BATCH}
    torch.manual_seed(0)
    exec(compile(script, "script.py", "exec"), names)
    return names


def without_patches(script: str) -> str:
    """The same script with functions that do nothing."""
    head, _, tail = script.partition(AXOLOTL)
    body = tail.partition(")\n")[2]
    nothing = "apply_lora_kernel_patches = lambda model, cfg: model\npatch_self_attn_lora = print\n"
    return head + nothing + "get_attention_cls_from_config = lambda cfg: torch.nn.ReLU\n" + body


# PEFT's remark on the linear layers of GPT-2
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text", "phi3", "gpt2", "falcon"])
def test_the_script_runs_and_trains_as_peft_does(model_type: str, tmp_path: Path) -> None:
    tiny_model(model_type).save_pretrained(tmp_path)
    assert SCRIPT.count(AXOLOTL) == 1
    names = run(SCRIPT.replace(AXOLOTL, OPAKE), tmp_path)
    losses = names["losses"]
    assert losses[-1] < losses[0]
    assert isinstance(names["refused"], TypeError)
    assert names["stock"] is None or len(names["stock"]) == 4
    restore()
    plain = without_patches(SCRIPT).replace("attention = next", "attention = torch.nn.ReLU() or next")
    torch.testing.assert_close(losses, run(plain, tmp_path)["losses"], rtol=1e-4, atol=1e-4)
