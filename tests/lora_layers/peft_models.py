"""Tiny PEFT models in float64 with random adapters, and what is needed to compare a patched one with its twin."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from opake.lora.axolotl import apply_lora_kernel_patches, kernel_report
from opake.testing.oracle import relative_error

from .subjects import double_model, fused, gradients, randomised

QKV, O, MLP, EMBEDDING = "lora_qkv_kernel", "lora_o_kernel", "lora_mlp_kernel", "lora_embedding_kernel"
ALL = {QKV: True, O: True, MLP: True}
EVERYTHING = {"qkv": 2, "mlp": 2, "w": 2}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def peft_model(model_type: str = "llama", base: dict[str, Any] | None = None, **options: Any) -> Any:
    """A PEFT model around a tiny one; `base` overrides its config, `options` the LoraConfig."""
    settings = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False", UserWarning)
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)
        warnings.filterwarnings("ignore", "`lora_bias=True` was passed", UserWarning)
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
        found = get_peft_model(double_model(model_type, **(base or {})), LoraConfig(**settings))
    return randomised(found.double())


def pair(*args: Any, cfg: Any = ALL, quiet: bool = True, **options: Any) -> tuple[Any, Any]:
    """(patched model, its twin as PEFT made it)."""
    model = peft_model(*args, **options)
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        if quiet:
            warnings.simplefilter("ignore")
        apply_lora_kernel_patches(model, cfg)
    return model, twin


def assert_same(model: Any, twin: Any, expected: dict[str, int] | None = None) -> None:
    """Same loss and gradients; `expected`: what went through a fused op."""
    (loss, got), (wanted, want) = gradients(model), gradients(twin)
    torch.testing.assert_close(loss, wanted)
    assert got.keys() == want.keys()
    assert relative_error(got, want) < 1e-9
    if expected is not None:
        assert fused(loss) == expected


def reasons(model: Any) -> set[str]:
    """Why something was not fused, by the report, when patched or since."""
    report = kernel_report(model)
    assert report is not None
    return {row.reason for row in report.rows if row.state in ("skipped", "stock")} | {
        fallback.reason for fallback in report.fallbacks
    }


def layer(model: Any, index: int = 0) -> Any:
    return model.base_model.model.model.layers[index]
