"""Fused LoRA in place: installed on the instance, undone `is`-identical, alive to whatever the model lives through."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.func import functional_call
from transformers import LlamaConfig

from opake.checking.tiny import tiny_model
from opake.functional import clipped_grad, per_example_grads
from opake.lora import qkv
from opake.patches import apply_model_patches, patch_report, restore
from opake.testing.oracle import model_loop_gradients, relative_error
from opake.testing.snapshot import differences, model_snapshot

from .peft_models import BATCH, EVERYTHING, fused, gradients, patch, peft_model, trainable, with_lora

# what a family has besides one LoRA op a projection
FAMILIES = {
    "llama": EVERYTHING,
    "qwen2": EVERYTHING,
    "qwen3": EVERYTHING,
    "gemma3_text": EVERYTHING,
    "olmo2": EVERYTHING,
    "cohere": EVERYTHING,
    "glm4": EVERYTHING,
    "phi3": {"mlp": 2, "w": 4},
}


def layers(model: Any) -> Any:
    return model.base_model.model.model.layers


@pytest.mark.parametrize("model_type", FAMILIES)
def test_family(model_type: str) -> None:
    model = peft_model(model_type)
    want = model_loop_gradients(model, **BATCH)
    report = patch(model)
    loss, _ = gradients(model)
    assert fused(loss) == FAMILIES[model_type]
    found = {flag: len(report.find(flag=flag, state="applied")) for flag in ("lora_qkv", "lora_mlp")}
    assert found == {f"lora_{kind}": FAMILIES[model_type].get(kind, 0) for kind in ("qkv", "mlp")}
    assert patch_report(model).fallbacks == ()
    params = trainable(model)
    for engine in ("vmap", "batched"):
        assert relative_error(per_example_grads(model, engine=engine)(params, **BATCH), want) < 1e-9


def test_batched_engine_is_chosen_where_every_adapter_is_fused() -> None:
    model = peft_model()
    patch(model)
    assert clipped_grad(model, clip_norm=1.0)(trainable(model), **BATCH).engine == "batched"
    model.base_model.model.model.layers[0].mlp.up_proj.lora_A.default.register_forward_hook(lambda *_: None)
    found = clipped_grad(model, clip_norm=1.0)(trainable(model), **BATCH)
    assert found.engine == "vmap"
    assert "up_proj.lora_A" in found.reason


@pytest.mark.parametrize("options", [{"use_dora": True}, {"target_modules": ["embed_tokens", "q_proj"]}])
def test_batched_engine_is_refused_where_one_is_not(options: dict[str, Any]) -> None:
    model = peft_model(**options)
    patch(model)
    assert clipped_grad(model, clip_norm=1.0)(trainable(model), **BATCH).engine == "vmap"


def test_lora_bias_has_an_example_axis() -> None:
    model = peft_model(lora_bias=True)
    want = model_loop_gradients(model, **BATCH)
    patch(model)
    assert relative_error(per_example_grads(model, engine="batched")(trainable(model), **BATCH), want) < 1e-9


def test_restore_is_identical() -> None:
    model = peft_model("qwen2")
    before = model_snapshot(model)
    patch(model)
    assert list(differences(before, model_snapshot(model)))
    gradients(model)
    with model.disable_adapter():
        model(**BATCH)
    restore(model)
    assert list(differences(before, model_snapshot(model))) == []


def test_other_models_are_untouched() -> None:
    model, other = peft_model(), peft_model()
    before = model_snapshot(other)
    patch(model)
    assert list(differences(before, model_snapshot(other))) == []
    assert fused(gradients(peft_model())[0]) == {}


def test_patching_twice_and_around_peft() -> None:
    base = tiny_model("llama").double()
    first = patch(base)
    assert {row.state for row in first.find(flag="lora_qkv")} == {"skipped"}
    model = with_lora(base)
    assert fused(gradients(model)[0]) == {}
    patch(model)
    assert fused(gradients(model)[0]) == EVERYTHING
    again = patch(model)
    assert {row.state for row in again.find(flag="lora_mlp")} == {"already"}
    assert fused(gradients(model)[0]) == EVERYTHING


@pytest.mark.parametrize(
    ("off", "expected"),
    [
        ({"lora_w": False}, {"qkv": 2, "mlp": 2}),
        ({"lora_qkv": False}, {"mlp": 2, "w": 8}),
        ({"lora_mlp": False}, {"qkv": 2, "w": 8}),
        ({"peft": False}, {}),
        ({"peft": False, "lora_qkv": True}, {"qkv": 2}),
    ],
)
def test_each_level_has_a_switch(off: dict[str, bool], expected: dict[str, int]) -> None:
    model = peft_model()
    want = gradients(model)[1]
    patch(model, **off)
    loss, got = gradients(model)
    assert fused(loss) == expected
    assert relative_error(got, want) < 1e-9


def test_deep_copy_is_fused_on_its_own() -> None:
    model = peft_model()
    patch(model)
    twin = copy.deepcopy(model)
    want = gradients(model)[0]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    loss = gradients(twin)[0]
    assert fused(loss) == EVERYTHING
    assert torch.equal(loss, want)
    restore(model)
    assert fused(gradients(twin)[0]) == EVERYTHING


def test_weights_are_read_at_the_call() -> None:
    model = peft_model()
    patch(model)
    params = {name: torch.zeros_like(p) for name, p in trainable(model).items()}
    with model.disable_adapter(), torch.no_grad():
        base = model(**BATCH).logits
    out = functional_call(model, params, (), BATCH)
    torch.testing.assert_close(out.logits, base)
    assert not torch.allclose(model(**BATCH).logits, base)


@pytest.mark.parametrize("first", [True, False])
def test_gradient_checkpointing(first: bool) -> None:
    model = peft_model()
    want, loop = gradients(model)[1], model_loop_gradients(model, **BATCH)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    if first:
        enable()
    patch(model)
    if not first:
        enable()
    assert relative_error(gradients(model)[1], want) < 1e-9
    for engine in ("vmap", "batched"):
        assert relative_error(per_example_grads(model, engine=engine)(trainable(model), **BATCH), loop) < 1e-9


def test_generation() -> None:
    model = peft_model().eval()
    ids = BATCH["input_ids"][:1, :5]
    want = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
    patch(model)
    got = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
    assert torch.equal(got, want)


def test_state_dict_is_that_of_peft() -> None:
    model = peft_model()
    before = model.state_dict()
    patch(model)
    after = model.state_dict()
    assert before.keys() == after.keys()
    model.load_state_dict(before)


def test_a_projection_outside_its_attention_is_on_its_own() -> None:
    model = peft_model()
    patch(model)
    x = torch.randn(2, 3, 32, dtype=torch.float64)
    assert fused(layers(model)[0].self_attn.q_proj(x).sum()) == {"w": 1}
    # a projection without an adapter is folded into the three, and is itself elsewhere
    partial = peft_model(target_modules=["q_proj"])
    patch(partial)
    k_proj = layers(partial)[0].self_attn.k_proj
    assert torch.equal(k_proj(x), torch.nn.functional.linear(x, k_proj.weight))


def test_nothing_waits_after_an_error() -> None:
    model = peft_model()
    patch(model)
    want = gradients(model)[0]

    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    handle = layers(model)[0].self_attn.k_proj.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        model(**BATCH)
    handle.remove()
    assert getattr(qkv._open, "scope", None) is None
    assert torch.equal(gradients(model)[0], want)


def test_forwards_in_several_threads() -> None:
    model = peft_model()
    patch(model)
    batches = [{k: v[i : i + 1] for k, v in BATCH.items()} for i in range(3)]
    want = [model(**batch).loss.detach() for batch in batches]
    got: dict[int, torch.Tensor] = {}

    def work(i: int) -> None:
        for _ in range(5):
            got[i] = model(**batches[i]).loss.detach()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(got[i], want[i]) for i in range(3))


def test_different_inputs_are_not_mixed_up() -> None:
    model = peft_model()
    patch(model)
    attention = layers(model)[0].self_attn
    x, other = torch.randn(2, 1, 3, 32, dtype=torch.float64)
    scope = qkv.Scope(attention)
    q, k = scope.output(attention.q_proj, x), scope.output(attention.k_proj, other)
    assert q is not None
    assert k is None
    torch.testing.assert_close(q, attention.q_proj(x))


def test_a_replaced_projection_is_left_alone() -> None:
    model = peft_model(target_modules=["q_proj", "v_proj"])
    patch(model)
    attention = layers(model)[0].self_attn
    attention.k_proj = torch.nn.Linear(32, attention.k_proj.out_features, bias=False).double()
    loss, _ = gradients(model)
    assert fused(loss) == {"qkv": 1, "w": 2}
    assert any(f.reason == "k_proj was replaced after patching" for f in patch_report(model).fallbacks)


def test_a_foreign_forward_is_respected() -> None:
    model = peft_model()
    attention = layers(model)[0].self_attn
    stock = attention.q_proj.forward
    attention.q_proj.forward = lambda x: stock(x) * 2
    want = gradients(model)[1]
    report = patch(model)
    loss, got = gradients(model)
    assert fused(loss) == {"qkv": 1, "mlp": 2, "w": 4}
    assert relative_error(got, want) < 1e-9
    assert "the forward of q_proj was replaced by somebody else" in str(report)


def test_activation_changed_after_patching() -> None:
    model = peft_model()
    patch(model)
    layers(model)[0].mlp.act_fn = torch.nn.Tanh()
    twin = peft_model()
    layers(twin)[0].mlp.act_fn = torch.nn.Tanh()
    loss, got = gradients(model)
    assert fused(loss) == {"qkv": 2, "mlp": 1, "w": 5}
    assert relative_error(got, gradients(twin)[1]) < 1e-9


@pytest.mark.parametrize("act", ["gelu", "gelu_pytorch_tanh", "relu"])
def test_the_activation_is_the_model_s_own(act: str) -> None:
    model = peft_model(base={"hidden_act": act})
    want = gradients(model)[1]
    patch(model)
    loss, got = gradients(model)
    assert fused(loss) == EVERYTHING
    assert relative_error(got, want) < 1e-9


def test_an_mlp_with_biases_is_fused_by_projection() -> None:
    model = peft_model(base={"mlp_bias": True})
    want = gradients(model)[1]
    patch(model)
    loss, got = gradients(model)
    assert fused(loss) == {"qkv": 2, "w": 8}
    assert relative_error(got, want) < 1e-9


def test_fp32_adapters_on_a_bf16_base() -> None:
    base = tiny_model("llama").bfloat16()
    model = with_lora(base).bfloat16()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    exact, stock = gradients(copy.deepcopy(model).double())[1], gradients(copy.deepcopy(model))[1]
    patch(model)
    loss, got = gradients(model)
    assert fused(loss) == EVERYTHING
    assert {g.dtype for g in got.values()} == {torch.float32}
    # the low-rank branch is computed in bf16, as the base is: no error of another order than stock's
    assert worst_error(got, exact) < 2 * worst_error(stock, exact)


def worst_error(got: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Of all parameters, the largest root mean square of the error over that of the gradient."""
    return max(float((got[n].double() - e).norm() / e.norm()) for n, e in exact.items())


def test_autocast() -> None:
    model = with_lora(tiny_model("llama"))
    exact = gradients(copy.deepcopy(model).double())[1]
    twin = copy.deepcopy(model)
    patch(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (loss, got), (wanted, stock) = gradients(model), gradients(twin)
    assert fused(loss) == EVERYTHING
    assert loss.dtype == wanted.dtype
    assert {g.dtype for g in got.values()} == {torch.float32}
    assert worst_error(got, exact) < 2 * worst_error(stock, exact)


def test_generic_family_still_has_its_projections() -> None:
    model = tiny_model("bloom").double()
    model = with_lora(model, target_modules=["query_key_value"])
    want = model_loop_gradients(model, **BATCH)
    with pytest.warns(match="bloom"):
        patch(model)
    loss, _ = gradients(model)
    assert fused(loss) == {"w": 2}
    assert relative_error(model_loop_gradients(model, **BATCH), want) < 1e-9


@pytest.mark.parametrize("module", ["self_attn", "mlp", "lm_head", "norm", "input_layernorm"])
@pytest.mark.parametrize("when", ["around a patched base", "on a patched PEFT model", "patched once more"])
def test_copies_that_peft_made_of_patched_layers_are_restored(module: str, when: str) -> None:
    config = LoraConfig(r=2, target_modules=["up_proj"], modules_to_save=[module], task_type="CAUSAL_LM")
    if module == "mlp":
        config.target_modules = {"q_proj"}
    if when == "on a patched PEFT model":
        model = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules=["o_proj"], task_type="CAUSAL_LM"))
        apply_model_patches(model, kernels=True)
        model.add_adapter("second", config)
        model.set_adapter("second")
    else:
        base = tiny_model("llama")
        apply_model_patches(base, kernels=True)
        model = get_peft_model(base, config)
    if when == "patched once more":
        apply_model_patches(model, kernels=True)
    want = model(**BATCH).loss
    restore(model)
    for name, each in model.named_modules():
        assert not [key for key in vars(each) if key == "forward" or key.startswith("_opake")], name
    configs = {id(held) for each in model.modules() for held in vars(each).values() if isinstance(held, LlamaConfig)}
    assert len(configs) == 1
    torch.testing.assert_close(model(**BATCH).loss, want, rtol=1e-5, atol=0)
