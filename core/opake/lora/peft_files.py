"""Adapters of ours written as a PEFT checkpoint, and read from one: `adapter_model.safetensors`, `adapter_config.json`.

PEFT itself is not needed. Values keep their dtype; what PEFT cannot say, or our layers cannot do, is an error before
anything is written or changed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from opake import hf
from opake.errors import InputError

from .driver import require_switch, wrappers
from .factors import Factors, factors_of, ranks_of
from .peft_load import CANONICAL, CONFIG, PREFIX, WEIGHTS, load_peft_adapter
from .peft_rewrites import require_read_as_written
from .shapes import is_conv1d

__all__ = ["load_peft_adapter", "peft_state", "save_peft_adapter"]

TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}
Number = TypeVar("Number", int, float)


def save_peft_adapter(
    model: nn.Module,
    directory: str | Path,
    *,
    base_model_name_or_path: str | None = None,
    task_type: str | None = None,
    for_peft: bool = True,
) -> None:
    """Write the adapters of `model` so that `PeftModel.from_pretrained(base, directory)` computes the same.

    base_model_name_or_path: noted in the config; None is what the model knows of itself
    task_type: PEFT's, e.g. `"CAUSAL_LM"`; None goes by the name of the model's class
    for_peft: False also writes what the installed PEFT would read as something else, for `load_peft_adapter` alone

    Raises:
        InputError: no adapters, or dropout that PEFT has no word for; layers that the installed PEFT would take for
            others: in models whose experts were separate layers once, it reads names such as `up_proj` as those.
    """
    require_switch("for_peft", for_peft)
    while (inner := hf.wrapped(model)) is not None and inner is not model:
        # names are those of the model itself
        model = inner
    tensors, config = peft_state(model)
    if for_peft:
        require_read_as_written(model, config)
    name = base_model_name_or_path or getattr(getattr(model, "config", None), "_name_or_path", None) or None
    config |= {"base_model_name_or_path": name, "task_type": task_type or _task_of(model)}
    from safetensors.torch import save_file

    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    ranks = {name: found for name, wrapper in wrappers(model).items() if (found := ranks_of(wrapper.adapter))}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt", CANONICAL: json.dumps(ranks)})
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def peft_state(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors, config) of a PEFT checkpoint with the adapters of `model`; nothing is written."""
    found = {}
    for name, wrapper in wrappers(model).items():
        place, factors = factors_of(name, wrapper)
        found[place] = factors
    if not found:
        raise InputError(f"{type(model).__name__} has no adapters of opake.lora; apply_lora puts them on")
    tensors = {}
    for name, factors in found.items():
        if factors.A.is_meta or factors.B.is_meta:
            raise InputError(f"the adapter of {name} is on the meta device and has no values to save")
        for kind, tensor in (("A", factors.A), ("B", factors.B)):
            tensors[f"{PREFIX}{name}.lora_{kind}.weight"] = tensor.detach().cpu().clone().contiguous()
    return tensors, _config(model, found)


def _config(model: nn.Module, found: Mapping[str, Factors]) -> dict[str, Any]:
    ranks = {name: factors.A.shape[0] for name, factors in found.items()}
    alphas = {name: _number(factors.scale * ranks[name]) for name, factors in found.items()}
    r, alpha = _commonest(ranks), _commonest(alphas)
    parameters = [f"{name}.weight" for name, factors in found.items() if factors.parameter]
    modules = {name: model.get_submodule(name) for name, factors in found.items() if not factors.parameter}
    return {
        "peft_type": "LORA",
        "r": r,
        "lora_alpha": alpha,
        "rank_pattern": {name: rank for name, rank in ranks.items() if rank != r},
        "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
        "lora_dropout": _dropout(found),
        "target_modules": sorted(modules),
        "target_parameters": sorted(parameters) or None,
        "fan_in_fan_out": any(is_conv1d(getattr(m, "to_wrap", m)) for m in modules.values()),
        "bias": "none",
        "lora_bias": False,
        "use_dora": False,
        "use_rslora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _dropout(found: Mapping[str, Factors]) -> float:
    kinds = {(factors.dropout, factors.dropout and factors.dropout_position) for factors in found.values()}
    if len(kinds) > 1:
        raise InputError(f"a PEFT checkpoint has one dropout for all layers, and these have {sorted(map(str, kinds))}")
    ((p, position),) = kinds
    if p and position != "pre":
        raise InputError(f"PEFT drops out the input of an adapter, and these drop out its output (p={p})")
    if p and any(factors.parameter for factors in found.values()):
        raise InputError(f"PEFT has no dropout for routers, and these have p={p}; set it to zero before saving")
    return p


def _commonest(values: Mapping[str, Number]) -> Number:
    return Counter(values.values()).most_common(1)[0][0]


def _number(value: float) -> float:
    """A whole number as an int, as PEFT writes it."""
    near = round(value)
    return near if abs(value - near) < 1e-12 * max(1.0, abs(value)) else value


def _task_of(model: nn.Module) -> str | None:
    name = type(model).__name__
    return next((task for ending, task in TASKS.items() if name.endswith(ending)), None)
