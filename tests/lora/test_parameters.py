"""LoRA on bare parameters, stacked experts and routers: per-example gradients where stock PEFT has none."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch

from opake.checking.tiny import tiny_model
from opake.errors import GenericFamilyWarning
from opake.functional import per_example_grads
from opake.patches import restore
from opake.testing.oracle import model_loop_gradients, relative_error
from opake.testing.snapshot import differences, model_snapshot

from .peft_models import BATCH, gradients, patch, trainable, with_lora


def sparse_model(model_type: str, **options: Any) -> Any:
    model = tiny_model(model_type).double()
    # the grouped product of torch has no float64
    model.set_experts_implementation(_trains_in_float64())
    return with_lora(model, **options)


@functools.cache
def _trains_in_float64() -> str:
    """Older Transformers writes into the indices that the backward of its batched product needs."""
    model = tiny_model("mixtral").double()
    model.set_experts_implementation("batched_mm")
    try:
        model(**BATCH).loss.backward()
    except RuntimeError:
        return "eager"
    return "batched_mm"


def patched(model: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GenericFamilyWarning)
        return patch(model)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]},
        {"target_modules": ["gate", "q_proj"]},
    ],
    ids=["everything", "down_proj", "router"],
)
def test_per_example_gradients(model_type: str, options: dict[str, Any]) -> None:
    model = sparse_model(model_type, **options)
    want = model_loop_gradients(model, **BATCH)
    report = patched(model)
    assert report.find(record="LoraParameter", state="applied")
    assert relative_error(per_example_grads(model, engine="vmap")(trainable(model), **BATCH), want) < 1e-9


def test_stock_peft_fails_there() -> None:
    model = sparse_model("mixtral")
    patched(model)
    for module in model.modules():
        if type(module).__name__ == "ParamWrapper":
            del module.forward
    with pytest.raises(RuntimeError, match="in-place"):
        per_example_grads(model, engine="vmap")(trainable(model), **BATCH)


def test_outside_transforms_it_is_peft() -> None:
    model = sparse_model("mixtral")
    twin = copy.deepcopy(model)
    before = model_snapshot(model)
    patched(model)
    (loss, got), (wanted, want) = gradients(model), gradients(twin)
    torch.testing.assert_close(loss, wanted)
    assert relative_error(got, want) < 1e-9
    for then in ("disable_adapter_layers", "enable_adapter_layers", "merge_adapter", "unmerge_adapter"):
        for each in (model, twin):
            getattr(each.base_model, then)()
        with torch.no_grad():
            torch.testing.assert_close(model(**BATCH).logits, twin(**BATCH).logits)
    restore(model)
    changed = [line for line in differences(before, model_snapshot(model)) if ".forward" in line or "opake" in line]
    assert changed == []


def test_the_parameter_is_back_after_an_error() -> None:
    model = sparse_model("mixtral")
    patched(model)
    experts = next(m for m in model.modules() if type(m).__name__ == "MixtralExperts")
    before = dict(experts._parameters)

    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    experts.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        per_example_grads(model, engine="vmap")(trainable(model), **BATCH)
    assert all(experts._parameters[name] is parameter for name, parameter in before.items())
