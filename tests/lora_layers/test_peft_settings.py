"""Settings of PEFT checkpoints: which initialisations may load, and files that are none."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from opake.checking.tiny import tiny_model
from opake.errors import InputError
from opake.lora import apply_lora, load_peft_adapter, save_peft_adapter
from opake.testing.snapshot import differences, model_snapshot

from .subjects import BATCH, randomised

pytestmark = [
    pytest.mark.filterwarnings("ignore:Could not find a config file in:UserWarning"),
    pytest.mark.filterwarnings("ignore:`init_lora_weights` is 'eva' but `eva_config`:UserWarning"),
    pytest.mark.filterwarnings("ignore:lora with eva initialization used with:UserWarning"),
]
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**BATCH).logits


def started(base: Any, init: Any) -> Any:
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=init)
    return get_peft_model(deepcopy(base), config)


@pytest.fixture
def ours(tmp_path: Path) -> tuple[Any, Path]:
    """(bare model, folder with an adapter for it)."""
    base = tiny_model("llama")
    save_peft_adapter(randomised(apply_lora(deepcopy(base), "q_proj")), tmp_path)
    return base, tmp_path


def edited(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / CONFIG).read_text()) | settings
    (folder / CONFIG).write_text(json.dumps(config))


@pytest.mark.parametrize("init", [True, "gaussian", "orthogonal", "eva", "mica"])
def test_what_initialises_the_adapter_alone_loads(init: Any, tmp_path: Path) -> None:
    base = tiny_model("llama")
    peft = randomised(started(base, init))
    peft.save_pretrained(tmp_path)
    assert json.loads((tmp_path / CONFIG).read_text())["init_lora_weights"] == init
    want = logits(peft)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(deepcopy(base), tmp_path)), want)
    torch.testing.assert_close(logits(load_peft_adapter(base, tmp_path)), want)


@pytest.mark.parametrize("init", [False, None])
def test_no_initialisation_loads(init: Any, ours: tuple[Any, Path]) -> None:
    base, folder = ours
    edited(folder, init_lora_weights=init)
    want = logits(PeftModel.from_pretrained(deepcopy(base), folder))
    torch.testing.assert_close(logits(load_peft_adapter(base, folder)), want)


@pytest.mark.filterwarnings("ignore:.*changes the base weights of the model:UserWarning")
@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_what_changes_the_base_is_refused_and_peft_converts_it(init: str, tmp_path: Path) -> None:
    base = tiny_model("llama")
    peft = started(base, init)
    # what the way out needs, as PEFT's documentation has it: the adapter before training
    peft.peft_config["default"].init_lora_weights = True
    peft.save_pretrained(tmp_path / "start")
    peft.peft_config["default"].init_lora_weights = init
    want = logits(randomised(peft))
    peft.save_pretrained(tmp_path)
    before = model_snapshot(base)
    with pytest.raises(InputError, match=f"init_lora_weights='{init}'.*path_initial_model_for_weight_conversion"):
        load_peft_adapter(base, tmp_path)
    assert list(differences(before, model_snapshot(base))) == []
    peft.save_pretrained(tmp_path / "new", path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    torch.testing.assert_close(logits(load_peft_adapter(base, tmp_path / "new")), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("init", ["loftq", "corda", "lora_ga", "PiSSA", "of_tomorrow", 2, ["pissa"]])
def test_other_initialisations_are_refused(init: Any, ours: tuple[Any, Path]) -> None:
    base, folder = ours
    edited(folder, init_lora_weights=init)
    with pytest.raises(InputError, match=r"has init_lora_weights=.*PeftModel\.from_pretrained"):
        load_peft_adapter(base, folder)


def test_what_the_config_leaves_out_is_as_in_peft(ours: tuple[Any, Path]) -> None:
    base, folder = ours
    config = json.loads((folder / CONFIG).read_text())
    for name in ("lora_alpha", "lora_dropout", "init_lora_weights", "alpha_pattern", "bias"):
        del config[name]
    (folder / CONFIG).write_text(json.dumps(config))
    want = logits(PeftModel.from_pretrained(deepcopy(base), folder))
    torch.testing.assert_close(logits(load_peft_adapter(base, folder)), want)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no valid JSON"),
        ("", "is no valid JSON"),
        ("[1, 2]", "holds a list, expected a JSON object"),
        ("null", "holds a NoneType, expected a JSON object"),
        ("{}", "is of peft_type 'None'"),
        ('{"peft_type": "LORA", "lora_alpha": null}', "lora_alpha=None is a NoneType, expected a number"),
        ('{"peft_type": "LORA", "lora_dropout": "no"}', "lora_dropout='no' is a str, expected a number"),
        ('{"peft_type": "LORA", "alpha_pattern": [3]}', "alpha_pattern=.* is a list, expected an object"),
        ('{"peft_type": "LORA", "alpha_pattern": {"q_proj": "3"}}', "alpha_pattern.*is a str, expected a number"),
    ],
)
def test_a_broken_config_is_named(text: str, message: str, ours: tuple[Any, Path]) -> None:
    base, folder = ours
    (folder / CONFIG).write_text(text)
    with pytest.raises(InputError, match=message):
        load_peft_adapter(base, folder)


@pytest.mark.parametrize("kept", [0, 4, 40, -8])
def test_broken_weights_are_named(kept: int, ours: tuple[Any, Path]) -> None:
    base, folder = ours
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:kept])
    before = model_snapshot(base)
    with pytest.raises(InputError, match=f"{WEIGHTS} cannot be read"):
        load_peft_adapter(base, folder)
    assert list(differences(before, model_snapshot(base))) == []
