"""Experts in place: which gates are recognised, what stays with Transformers and why, adapters, jitter, engines."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from opake import hf
from opake.checking.tiny import tiny_batch, tiny_config, tiny_model
from opake.experts.gates import gate_of
from opake.functional import per_example_grads
from opake.patches import apply_model_patches, patch_report, restore
from opake.testing.cases.experts import routers, stacks
from opake.testing.oracle import model_loop_gradients, relative_error
from opake.testing.vmapped import vmap_gradients
from opake_kernels.activations import Activation

LIMIT = 5e-6


def _rows(report, record):
    return [row for row in report.rows if row.record.startswith(record)]


def _experts(model):
    return next(module for name, module in model.named_modules() if name.endswith(".experts"))


def _lora(model, **options):
    with warnings.catch_warnings():
        # PEFT asks a deprecated name of Transformers, and has something to say about several parameters of a module
        warnings.simplefilter("ignore")
        torch.manual_seed(3)
        return get_peft_model(model, LoraConfig(r=4, lora_alpha=2, init_lora_weights=False, **options)).train()


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "relu2", "quick_gelu"])
def test_gates_by_activation(name):
    from transformers.activations import ACT2FN

    experts = _experts(tiny_model("mixtral", hidden_act=name))
    gate = gate_of(experts)
    assert gate is not None
    assert not gate.paired
    x = torch.linspace(-3, 3, 50, dtype=torch.float64)
    torch.testing.assert_close(gate.activation.reference(x, None), ACT2FN[name](x))


def test_gates_of_their_own():
    gpt_oss, deepseek = (gate_of(_experts(tiny_model(name))) for name in ("gpt_oss", "deepseek_v4"))
    assert gpt_oss == (Activation("silu", alpha=1.702, limit=7.0, offset=1.0), True)
    assert deepseek == (Activation("silu", limit=10.0), False)


def test_unknown_gate_stays():
    stock, model = (tiny_model("mixtral", hidden_act="tanh") for _ in "ab")
    rows = _rows(apply_model_patches(model), "Experts(")
    assert {row.state for row in rows} == {"stock"}
    assert "a gate that opake_moe does not know" in rows[0].reason
    batch = tiny_batch()
    with warnings.catch_warnings():
        # a grouped product without a batching rule is looped over
        warnings.filterwarnings("ignore", ".*batching rule", UserWarning)
        got = vmap_gradients(model, batch)
    assert relative_error(got, model_loop_gradients(stock, **batch)) <= LIMIT


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: setattr(m, "has_gate", False), "has no gate"),
        (lambda m: setattr(m, "has_post_expert_norm", True), "normalises the output"),
        (lambda m: setattr(m, "_is_expert_parallel", True), "is spread over devices"),
        (lambda m: m.register_parameter("more", torch.nn.Parameter(torch.ones(1))), "has the parameters"),
        (lambda m: m.to(torch.float8_e4m3fn), "keeps its weights in torch.float8_e4m3fn"),
        (lambda m: vars(m).update(forward=lambda *a: None), "was replaced"),
    ],
)
def test_what_stays_with_transformers(change, reason):
    model = tiny_model("mixtral")
    change(_experts(model))
    rows = _rows(apply_model_patches(model), "Experts(")
    assert [row.state for row in rows] == ["stock", "applied"]
    assert reason in rows[0].reason


def test_report_names_path_and_cost():
    report = apply_model_patches(tiny_model("qwen3_moe"))
    (row, *_), (path, *_) = _rows(report, "Experts("), _rows(report, "GroupedExperts")
    # 4 experts of 3 x 32 x 24 numbers in float32
    assert (
        row.reason
        == "opake_moe in place of grouped_mm; a gradient of its own for each example takes 0.03516 MiB an example"
    )
    assert path.reason.startswith(("Opake_GroupedMoE: grouped_mm, float32 on cpu", "Opake_FusedMoE: Triton"))
    frozen = tiny_model("qwen3_moe").requires_grad_(False)
    report = apply_model_patches(frozen, grouped_moe=False)
    assert _rows(report, "Experts(")[0].reason == "opake_moe in place of grouped_mm"
    assert {row.state for row in _rows(report, "GroupedExperts")} == {"off"}


def test_grouped_paths_need_no_cuda():
    for options, reason in (({"kernels": False}, "kernels=False"), ({"performance": False}, "performance=False")):
        rows = _rows(apply_model_patches(tiny_model("mixtral"), **options), "GroupedExperts")
        assert {(row.state, row.reason) for row in rows} == {("off", reason)}
    assert {row.state for row in _rows(apply_model_patches(tiny_model("mixtral")), "GroupedExperts")} == {"applied"}


def test_no_other_model_is_reached():
    """A model of the same config object, and one of a deep copy, keep their own experts."""
    config = tiny_config("mixtral")
    first, second = tiny_model(config), tiny_model(config)
    # a patched model that another file keeps needs the name in any case
    gc.collect()
    needed = "opake" in hf.experts_functions()
    apply_model_patches(first)
    assert hf.experts_name(_experts(first)) == "opake"
    assert hf.experts_name(_experts(second)) == "grouped_mm"
    twin = copy.deepcopy(first)
    restore(first)
    assert hf.experts_name(_experts(first)) == "grouped_mm"
    assert "opake" in hf.experts_functions()
    batch = tiny_batch()
    assert relative_error(vmap_gradients(twin, batch), model_loop_gradients(second, **batch)) <= LIMIT
    restore(twin)
    assert needed or "opake" not in hf.experts_functions()


def test_gate_changed_after_patching():
    stock, model = tiny_model("mixtral"), tiny_model("mixtral")
    apply_model_patches(model)
    for each in (stock, model):
        _experts(each).act_fn = torch.nn.Tanh()
    batch = tiny_batch()
    torch.testing.assert_close(model(**batch).logits, stock(**batch).logits)
    report = patch_report(model)
    assert report is not None
    assert "the gate was changed after patching" in report.fallbacks[0].reason


@pytest.mark.parametrize("state", ["two at once", "off", "merged"])
def test_states_of_adapters(state):
    model = tiny_model("qwen3_moe")
    names = stacks(model) + routers(model)
    stock = _lora(model, target_modules=[], target_parameters=names)
    if state == "two at once":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            more = LoraConfig(r=2, lora_alpha=3, target_modules=[], target_parameters=names, init_lora_weights=False)
            stock.add_adapter("more", more)
        stock.base_model.set_adapter(["default", "more"])
    patched = copy.deepcopy(stock)
    apply_model_patches(patched)
    for each in (stock, patched):
        if state == "merged":
            each.merge_adapter()
    batch = tiny_batch()
    if state == "off":
        with stock.disable_adapter(), patched.disable_adapter():
            torch.testing.assert_close(patched(**batch).logits, stock(**batch).logits)
        return
    torch.testing.assert_close(patched(**batch).logits, stock(**batch).logits, rtol=1e-4, atol=1e-5)
    if state == "two at once":
        got = vmap_gradients(patched, batch)
        assert {name.split(".")[-2] for name in got} == {"default", "more"}
        assert relative_error(got, model_loop_gradients(stock, **batch)) <= LIMIT


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_experts_in_half_precision(model_type):
    """bf16 stacks with adapters: at most twice the error of the stock model, against float32."""
    config = tiny_config(model_type)
    exact = tiny_model(config).bfloat16().float()
    stock = copy.deepcopy(exact).bfloat16()
    model = copy.deepcopy(stock)
    apply_model_patches(model)
    batch = tiny_batch()

    def error(of):
        with torch.no_grad():
            return float((of(**batch).logits.float() - exact(**batch).logits).norm())

    assert error(model) <= 2 * error(stock)


def test_jitter_is_of_each_example():
    """Router jitter draws numbers: with randomness="different" two equal rows differ, with "same" they do not."""
    model = tiny_model("mixtral", router_jitter_noise=0.3)
    apply_model_patches(model)
    params = {name: p.detach() for name, p in model.named_parameters() if name.endswith("gate.weight")}
    ids = tiny_batch(rows=1, padding="none")["input_ids"].repeat(2, 1)

    def loss(params, ids):
        return functional_call(model, params, kwargs={"input_ids": ids, "labels": ids}).loss

    for randomness, alike in (("different", False), ("same", True)):
        torch.manual_seed(0)
        found = vmap(grad(loss), (None, 0), randomness=randomness)(params, ids)
        rows = next(iter(found.values()))
        assert torch.allclose(rows[0], rows[1]) == alike
        assert rows.isfinite().all()


def test_batched_engine():
    """Frozen experts stand in the way of no engine; the router's loss counts over rows, so there vmap serves."""
    for router_loss in (False, True):
        model = _lora(tiny_model("mixtral", output_router_logits=router_loss), target_modules=["q_proj", "v_proj"])
        apply_model_patches(model)
        params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        batch = tiny_batch()
        if router_loss:
            with pytest.raises(Exception, match="the auxiliary loss of a router counts over all rows"):
                per_example_grads(model, engine="batched")(params, **batch)
            continue
        got, want = (per_example_grads(model, engine=engine)(params, **batch) for engine in ("batched", "vmap"))
        assert relative_error(got, want) <= LIMIT


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("trained", ["stacks", "adapters"])
def test_batched_engine_of_experts(model_type, trained):
    """Stacks and their adapters with an example axis: one ordinary backward, the same gradients, chosen by itself."""
    model = tiny_model(model_type)
    if trained == "adapters":
        model = _lora(model, target_modules=["q_proj", "v_proj"], target_parameters=stacks(model))
    else:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in stacks(model))
    apply_model_patches(model, lora_w=True)
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    batch = tiny_batch(padding="left")
    got, want = (per_example_grads(model, engine=engine)(params, **batch) for engine in ("batched", "vmap"))
    assert relative_error(got, want) <= LIMIT


def test_experts_alone():
    """The op on the modules of a model equals Transformers' own function, also in gradients of the stacks."""
    for model_type in ("mixtral", "gpt_oss"):
        experts, stock = (_experts(tiny_model(model_type)) for _ in "ab")
        model = tiny_model(model_type)
        apply_model_patches(model)
        experts = _experts(model)
        x, (weights, index) = torch.randn(10, 32), functional.softmax(torch.randn(10, 4), -1).topk(2, -1)
        found = []
        for each in (experts, stock):
            out = each(x, index, weights)
            found.append([out, *torch.autograd.grad(out.square().sum(), list(each.parameters()))])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
