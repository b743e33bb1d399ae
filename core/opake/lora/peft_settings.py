"""The settings of a PEFT checkpoint: its config read from JSON, and what in it our layers cannot compute.

Only what decides about numbers is looked at. The tensors are read elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opake.errors import InputError

# settings that change what a layer computes, with the value that changes nothing
PLAIN = {"use_dora": False, "lora_bias": False, "use_bdlora": None, "alora_invocation_tokens": None}
PLAIN |= {"arrow_config": None, "kasa_config": None, "velora_config": None, "monteclora_config": None}
PLAIN |= {"modules_to_save": None, "trainable_token_indices": None, "layer_replication": None, "use_qalora": False}
# initialisations that write to the adapter alone; all others take something out of the base weight, at every load
INITS = ("gaussian", "orthogonal", "eva", "mica")
# what PEFT takes where the file says nothing
DEFAULTS = {"lora_alpha": 8, "lora_dropout": 0.0, "init_lora_weights": True}


def read_settings(file: Path) -> dict[str, Any]:
    """The config, with PEFT's defaults for what it leaves out. InputError for a file that is no JSON object."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{file} is no valid JSON: {error}; save the adapter again") from None
    if not isinstance(config, dict):
        raise InputError(f"{file} holds a {type(config).__name__}, expected a JSON object of settings")
    config = DEFAULTS | config
    _require_number(file, "lora_alpha", config["lora_alpha"])
    _require_number(file, "lora_dropout", config["lora_dropout"])
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise InputError(f"{file}: alpha_pattern={patterns!r:.80} is a {type(patterns).__name__}, expected an object")
    for name, value in patterns.items():
        _require_number(file, f"alpha_pattern[{name!r}]", value)
    return config


def require_plain(config: Mapping[str, Any]) -> None:
    """Raise InputError unless the checkpoint is LoRA as our layers compute it, on the base weights as they are."""
    kind = str(config.get("peft_type"))
    if kind.rpartition(".")[2] != "LORA":
        raise InputError(f"the checkpoint is of peft_type {kind!r}, and the layers of opake.lora are plain LoRA")
    odd = [f"{key}={config[key]!r}" for key, plain in PLAIN.items() if config.get(key) not in (plain, False, None, [])]
    if config.get("bias") not in (None, "none"):
        odd.append(f"bias={config['bias']!r}")
    if odd:
        raise InputError(f"the checkpoint has {', '.join(odd)}, which the layers of opake.lora do not have; use PEFT")
    init = config.get("init_lora_weights")
    if not (init is None or isinstance(init, bool) or (isinstance(init, str) and init.lower() in INITS)):
        raise InputError(
            f"the checkpoint has init_lora_weights={init!r}, by which PEFT may change the base weights when it loads "
            f"the adapter; opake.lora loads True, False and {', '.join(map(repr, INITS))}. Convert it with PEFT: "
            "save_pretrained(directory, path_initial_model_for_weight_conversion=...) writes an adapter for the "
            "unchanged base; or load it with PeftModel.from_pretrained"
        )


def _require_number(file: Path, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{file}: {name}={value!r:.80} is a {type(value).__name__}, expected a number")
