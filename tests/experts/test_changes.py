"""What is changed after patching: experts implementations, gates, hooks, with and without adapters on the stacks."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

from opake.checking.tiny import tiny_batch, tiny_model
from opake.errors import EngineUnavailable
from opake.functional import per_example_grads
from opake.patches import apply_model_patches, patch_report
from opake.testing.cases.experts import stacks, with_expert_lora
from opake.testing.oracle import model_loop_gradients, relative_error
from opake.testing.vmapped import vmap_gradients

LIMIT = 5e-6
SIZES = {"llama4_text": {"moe_layers": [0], "intermediate_size_mlp": 48}}


def _build(model_type, dtype=torch.float32):
    model = tiny_model(model_type, **SIZES.get(model_type, {})).to(dtype)
    if dtype == torch.float64 and model_type != "llama4_text":
        # grouped products know no float64
        model.set_experts_implementation("eager")
    return model


def _pair(model_type, adapted, dtype=torch.float32):
    """A stock model and its patched twin."""
    stock = _build(model_type, dtype)
    if adapted:
        stock = with_expert_lora(stock, stacks(stock))
    model = copy.deepcopy(stock)
    apply_model_patches(model, lora_w=True)
    return stock, model


def _experts(model):
    return [module for module in model.modules() if type(module).__name__.endswith("Experts")]


def _other_gate(model):
    for experts in _experts(model):
        experts.act_fn, experts.limit = torch.nn.Tanh(), 3.0


def _hooked_gate(model):
    for experts in _experts(model):
        experts.act_fn.register_forward_hook(lambda module, given, found: found * 1.5)


def _hooked_experts(model):
    for experts in _experts(model):
        experts.register_forward_hook(lambda module, given, found: found * 1.5)
        experts.register_forward_pre_hook(lambda module, given: (given[0] * 0.5, *given[1:]))


def _assert_same(stock, model):
    """Forward, per-example gradients by vmap and by whatever engine is chosen."""
    batch = tiny_batch(padding="left")
    torch.testing.assert_close(model(**batch).logits, stock(**batch).logits, rtol=1e-4, atol=1e-5)
    want = model_loop_gradients(stock, **batch)
    with warnings.catch_warnings():
        # a grouped product without a batching rule is looped over
        warnings.filterwarnings("ignore", ".*batching rule", UserWarning)
        assert relative_error(vmap_gradients(model, batch), want) <= LIMIT
        params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert relative_error(per_example_grads(model)(params, **batch), want) <= LIMIT


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("chosen", ["eager", "grouped_mm", "batched_mm"])
def test_implementation_set_after_patching(model_type, adapted, chosen):
    stock, model = _pair(model_type, adapted)
    inner = model.get_base_model() if adapted else model
    try:
        inner.set_experts_implementation(chosen)
        model(**tiny_batch()).loss.backward()
    except (ValueError, RuntimeError) as error:
        pytest.skip(f"this Transformers does not train with {chosen}: {error}")
    model.zero_grad()
    _assert_same(stock, model)


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "llama4_text"])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_another_gate(model_type, adapted, dtype):
    stock, model = _pair(model_type, adapted, dtype)
    for each in (stock, model):
        _other_gate(each)
    _assert_same(stock, model)
    report = patch_report(model)
    assert report is not None
    left = [row for row in report.rows if row.record.startswith("Experts(") and row.state == "stock"]
    assert left or [each for each in report.fallbacks if "changed after patching" in each.reason]


@pytest.mark.parametrize("model_type", ["mixtral", "llama4_text"])
@pytest.mark.parametrize("change", [_hooked_gate, _hooked_experts])
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks(model_type, change, when):
    stock, model = _build(model_type), _build(model_type)
    change(stock)
    if when == "before":
        change(model)
    apply_model_patches(model)
    if when == "after":
        change(model)
    _assert_same(stock, model)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("change", [_other_gate, lambda model: model.set_experts_implementation("batched_mm")])
def test_the_batched_engine_asks_again(adapted, change):
    """Other code than ours would not know what a stack with an example axis is."""
    _, model = _pair("mixtral", adapted)
    wanted = "lora_" if adapted else ".experts."
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(wanted in name)
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    per_example_grads(model, engine="batched")(params, **tiny_batch())
    change(model.get_base_model() if adapted else model)
    with pytest.raises(EngineUnavailable, match="consumed by an op without an example axis"):
        per_example_grads(model, engine="batched")(params, **tiny_batch())


def test_adapters_added_after_patching():
    """PEFT's way into a stack cannot run inside transforms; patching again takes them up."""
    stock, model = _build("mixtral"), _build("mixtral")
    apply_model_patches(model)
    names = stacks(model)
    stock, model = with_expert_lora(stock, names), with_expert_lora(model, names)
    batch = tiny_batch()
    torch.testing.assert_close(model(**batch).logits, stock(**batch).logits, rtol=1e-4, atol=1e-5)
    apply_model_patches(model)
    _assert_same(stock, model)


def test_stacks_of_llama4_in_eight_bits():
    model = _build("llama4_text")
    for experts in _experts(model):
        experts.to(torch.float8_e4m3fn)
    rows = [row for row in apply_model_patches(model).rows if row.record.startswith("Experts(")]
    assert {row.state for row in rows} == {"stock"}
    assert "keeps its weights in torch.float8_e4m3fn" in rows[0].reason
