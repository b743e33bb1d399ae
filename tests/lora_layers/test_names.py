"""Names, arguments and defaults are those of the documents that these modules follow, copied here line by line."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import opake.lora
from opake.lora import axolotl

EMPTY = inspect.Parameter.empty
ADAPTER = {
    "dim": 8,
    "alpha": 32,
    "dropout": 0.0,
    "dropout_position": "pre",
    "lora_A_init_method": "xavier",
    "lora_dtype": None,
}
BRANCH = (
    "in_features",
    "out_features",
    "tensor_parallel_mode",
    "tensor_parallel_group",
    "sequence_parallel",
    "accumulate_into_main_grad",
)
# class and method -> the arguments after self, with their defaults, in order
DOCUMENT: dict[str, dict[str, Any]] = {
    "LinearAdapter.__init__": {"orig_linear": EMPTY, **ADAPTER},
    "LinearAdapter._init_adapter": {**ADAPTER, "device": None, "base_dtype": None},
    "LinearAdapter.forward": {"x": EMPTY},
    "AdapterWrapper.__init__": {"to_wrap": EMPTY, "adapter": EMPTY},
    "LoRALinear.forward": {"x": EMPTY, "args": EMPTY, "kwargs": EMPTY},
    "LoRATopKRouter.forward": {"x": EMPTY, "args": EMPTY, "kwargs": EMPTY},
    "TEFusedLoRALinear.__init__": {"to_wrap": EMPTY, "adapter": EMPTY},
    "TEFusedLoRALinear._make_fused_branches": {},
    "TEFusedLoRALinear._make_main_branch": dict.fromkeys(BRANCH, EMPTY),
    "TEFusedLoRALinear._make_lora_branch": dict.fromkeys(BRANCH, EMPTY),
    "TEFusedLoRALinear.forward": {"x": EMPTY},
    "FusedLoRALinear.__init__": {"to_wrap": EMPTY, "adapter": EMPTY},
    "FusedLoRALinear._make_fused_branches": {},
    "FusedLoRALinear._make_main_branch": dict.fromkeys(BRANCH, EMPTY),
    "FusedLoRALinear._make_lora_branch": dict.fromkeys(BRANCH, EMPTY),
    "FusedLoRALinear.forward": {"x": EMPTY},
}
BASES = {
    "LoRALinear": "AdapterWrapper",
    "LoRATopKRouter": "AdapterWrapper",
    "TEFusedLoRALinear": "LoRALinear",
    "FusedLoRALinear": "LoRALinear",
}
FUNCTIONS = {
    "apply_lora_kernel_patches": ("model", "cfg"),
    "get_attention_cls_from_config": ("cfg",),
    "original_apply_o": ("self", "hidden_states"),
    "original_apply_qkv": ("self", "hidden_states"),
    "patch_self_attn_lora": ("cfg",),
}


@pytest.mark.parametrize("name", DOCUMENT)
def test_arguments_and_defaults(name: str) -> None:
    cls, _, method = name.partition(".")
    parameters = list(inspect.signature(getattr(getattr(opake.lora, cls), method)).parameters.values())[1:]
    assert {p.name: p.default for p in parameters} == DOCUMENT[name]
    assert [p.name for p in parameters] == list(DOCUMENT[name])


@pytest.mark.parametrize("method", ["_make_main_branch", "_make_lora_branch"])
@pytest.mark.parametrize("cls", ["TEFusedLoRALinear", "FusedLoRALinear"])
def test_branches_take_keywords_only(cls: str, method: str) -> None:
    parameters = list(inspect.signature(getattr(getattr(opake.lora, cls), method)).parameters.values())[1:]
    assert {p.kind for p in parameters} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(("name", "base"), BASES.items())
def test_bases(name: str, base: str) -> None:
    assert issubclass(getattr(opake.lora, name), getattr(opake.lora, base))
    assert issubclass(opake.lora.LinearAdapter, nn.Module)


def test_properties() -> None:
    for name in ("weight", "bias"):
        assert isinstance(inspect.getattr_static(opake.lora.LoRALinear, name), property)


@pytest.mark.parametrize(("name", "arguments"), FUNCTIONS.items())
def test_axolotl_functions(name: str, arguments: tuple[str, ...]) -> None:
    parameters = inspect.signature(getattr(axolotl, name)).parameters.values()
    assert tuple(p.name for p in parameters) == arguments
    assert {p.default for p in parameters} == {EMPTY}


def test_restore_takes_everything_by_default() -> None:
    assert {n: p.default for n, p in inspect.signature(axolotl.restore).parameters.items()} == {"target": None}


def test_every_name_is_there_and_every_public_name_is_documented_by_itself() -> None:
    assert set(opake.lora.__all__) <= set(dir(opake.lora))
    for name in (*opake.lora.__all__, *axolotl.__all__):
        value = getattr(opake.lora, name, None) or getattr(axolotl, name)
        assert inspect.getdoc(value), name
    with pytest.raises(AttributeError, match="no attribute 'LoraLinear'"):
        opake.lora.LoraLinear  # noqa: B018


def test_the_page_says_what_has_become_of_every_symbol_of_the_documents() -> None:
    page = (Path(__file__).parents[2] / "docs" / "lora_layers.md").read_text(encoding="utf-8")
    table = page.partition("| seed symbol | ours |")[2].partition("\n\n")[0]
    methods = {name.partition(".")[2] for name in DOCUMENT if "._" in name and "__" not in name}
    symbols = {name.partition(".")[0] for name in DOCUMENT} | methods | FUNCTIONS.keys() | {".weight", ".bias"}
    assert len(symbols) == 17
    for symbol in symbols:
        assert symbol in table, symbol


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, opake.lora; print(sorted({'torch', 'transformers', 'peft', 'triton'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
