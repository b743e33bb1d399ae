"""Every state that PEFT can be put in, before patching or after: what is fused, and that nothing else differs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig

from opake.functional import per_example_grads
from opake.patches import apply_model_patches, patch_report
from opake.testing.oracle import model_loop_gradients, relative_error

from .peft_models import BATCH, EVERYTHING, fused, gradients, patch, peft_model, randomised, trainable


class State(NamedTuple):
    """`options` of the LoraConfig, what is done after patching, what is fused then, and a reason the report gives."""

    options: dict[str, Any]
    then: Callable[[Any], None]
    fused: dict[str, int]
    reason: str = ""
    model_type: str = "llama"


def nothing(model: Any) -> None:
    pass


def layer(model: Any) -> Any:
    return model.base_model.model.model.layers[0]


def second_adapter(model: Any) -> None:
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model.add_adapter("other", LoraConfig(r=3, target_modules=targets))
    randomised(model.double())
    model.set_adapter("other")


def both_adapters(model: Any) -> None:
    second_adapter(model)
    model.base_model.set_adapter(["default", "other"])


def merged(model: Any) -> None:
    model.merge_adapter()


def merged_and_back(model: Any) -> None:
    model.merge_adapter()
    model.unmerge_adapter()


def frozen(*names: str) -> Callable[[Any], None]:
    def then(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if any(one in name for one in names):
                parameter.requires_grad_(False)

    return then


def thawed(*names: str) -> Callable[[Any], None]:
    def then(model: Any) -> None:
        for name in names:
            layer(model).get_parameter(name).requires_grad_()

    return then


def doubling(name: str) -> Callable[[Any], None]:
    def then(model: Any) -> None:
        layer(model).get_submodule(name).register_forward_hook(double_output)

    return then


def double_output(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return 2 * output


def halving_before(name: str) -> Callable[[Any], None]:
    def then(model: Any) -> None:
        layer(model).get_submodule(name).register_forward_pre_hook(half_input)

    return then


def half_input(module: Any, args: Any) -> tuple[torch.Tensor]:
    return (args[0] * 0.5,)


def halve_in_place(module: Any, args: Any) -> None:
    args[0].mul_(0.5)


def another_activation(model: Any) -> None:
    layer(model).mlp.act_fn.forward = torch.relu


def bias_of_a(model: Any) -> None:
    down = layer(model).self_attn.q_proj.lora_A["default"]
    down.bias = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))


def tensor_scaling(model: Any) -> None:
    layer(model).self_attn.q_proj.scaling["default"] = torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float64))


def rescaled(model: Any) -> None:
    layer(model).self_attn.q_proj.set_scale("default", 3.0)
    layer(model).mlp.down_proj.scale_layer(0.5)


def in_eval(model: Any) -> None:
    model.eval()


QKVO = ["q_proj", "k_proj", "v_proj", "o_proj"]
GATE = "self_attn.q_proj"
STATES = {
    "plain": State({}, nothing, EVERYTHING),
    "rslora": State({"use_rslora": True}, nothing, EVERYTHING),
    "patterns": State(
        {"rank_pattern": {"q_proj": 2, "down_proj": 3}, "alpha_pattern": {"k_proj": 9}}, nothing, EVERYTHING
    ),
    "pissa": State({"init_lora_weights": "pissa"}, nothing, EVERYTHING),
    "frozen base biases": State({}, nothing, EVERYTHING, model_type="qwen2"),
    "sliding window": State({}, nothing, EVERYTHING, model_type="mistral"),
    "q and v": State({"target_modules": ["q_proj", "v_proj"]}, nothing, {"qkv": 2}),
    "k and up": State({"target_modules": ["k_proj", "up_proj"]}, nothing, {"qkv": 2, "mlp": 2}),
    "o alone": State({"target_modules": ["o_proj"]}, nothing, {"w": 2}),
    "first layer": State({"target_modules": QKVO, "layers_to_transform": [0]}, nothing, {"qkv": 1, "w": 1}),
    "lora_bias": State({"lora_bias": True}, nothing, {"qkv": 2, "w": 8}, "gate_proj has a bias"),
    "bias=lora_only": State(
        {"bias": "lora_only"}, nothing, {"mlp": 2, "w": 2}, "q_proj: the base bias is trainable", "qwen2"
    ),
    "bias=all": State({"bias": "all"}, nothing, {"mlp": 2, "w": 2}, "the base bias is trainable", "qwen2"),
    "dora": State({"use_dora": True}, nothing, {}, "the adapter is a DoraLinearVariant"),
    "dropout in eval": State({"lora_dropout": 0.5}, in_eval, EVERYTHING),
    "modules_to_save down": State(
        {"target_modules": [*QKVO, "gate_proj", "up_proj"], "modules_to_save": ["down_proj"]},
        nothing,
        {"qkv": 2, "w": 6},
    ),
    "modules_to_save head": State({"modules_to_save": ["lm_head", "norm"]}, nothing, EVERYTHING),
    "embedding": State({"target_modules": ["embed_tokens", *QKVO]}, nothing, {"qkv": 2, "w": 2}),
    "head": State({"target_modules": ["lm_head", "q_proj"]}, nothing, {"qkv": 2, "w": 1}),
    "trainable tokens": State({"trainable_token_indices": [4, 5, 6]}, nothing, EVERYTHING),
    "gpt2": State({}, nothing, {"w": 8}, model_type="gpt2"),
    "combined projections": State({}, nothing, {"mlp": 2, "w": 4}, model_type="phi3"),
    "second adapter": State({}, second_adapter, EVERYTHING),
    "both adapters": State({}, both_adapters, {}, "several adapters are active"),
    "merged": State({}, merged, {}, "adapters are merged"),
    "merged and back": State({}, merged_and_back, EVERYTHING),
    "frozen A": State({}, frozen("lora_A"), EVERYTHING),
    "frozen B": State({}, frozen("lora_B"), EVERYTHING),
    "base weight trained": State(
        {}, thawed("self_attn.q_proj.base_layer.weight"), {"qkv": 1, "mlp": 2, "w": 4}, "the base weight is trainable"
    ),
    "norm trained": State({}, thawed("input_layernorm.weight"), EVERYTHING),
    "hook on a base layer": State(
        {},
        doubling("mlp.up_proj.base_layer"),
        {"qkv": 2, "mlp": 1, "w": 4},
        "up_proj: there is a hook on the base layer",
    ),
    "hook on A": State(
        {}, doubling("self_attn.k_proj.lora_A.default"), {"qkv": 1, "mlp": 2, "w": 4}, "inside the adapter"
    ),
    "hook on a layer of the MLP": State(
        {}, doubling("mlp.gate_proj"), {"qkv": 2, "mlp": 1, "w": 5}, "there is a hook on gate_proj"
    ),
    "hook on the activation": State({}, doubling("mlp.act_fn"), {"qkv": 2, "mlp": 1, "w": 5}, "the activation was"),
    "forward of the activation": State({}, another_activation, {"qkv": 2, "mlp": 1, "w": 5}, "the activation was"),
    "hook on a layer of the attention": State({}, doubling("self_attn.k_proj"), EVERYTHING),
    "hook before a layer of the attention": State(
        {}, halving_before("self_attn.k_proj"), {"qkv": 1, "mlp": 2, "w": 5}, "there is a hook in front of k_proj"
    ),
    "bias of A": State({}, bias_of_a, {"qkv": 1, "mlp": 2, "w": 4}, "lora_A has a bias"),
    "scaling in a tensor": State({}, tensor_scaling, {"qkv": 1, "mlp": 2, "w": 4}, "the scaling is a tensor"),
    "rescaled": State({}, rescaled, EVERYTHING),
}


def patched_and_twin(state: State) -> tuple[Any, Any]:
    model = peft_model(state.model_type, **state.options)
    twin = copy.deepcopy(model)
    patch(model)
    with warnings.catch_warnings():
        # PEFT on merging twice, and on a second adapter
        warnings.filterwarnings("ignore", category=UserWarning, module="peft")
        for each in (model, twin):
            state.then(each)
    return model, twin


@pytest.mark.parametrize("name", STATES)
def test_state(name: str) -> None:
    state = STATES[name]
    model, twin = patched_and_twin(state)
    got, want = gradients(model), gradients(twin)
    assert fused(got[0]) == state.fused
    torch.testing.assert_close(got[0], want[0])
    assert any(state.reason in fallback.reason for fallback in patch_report(model).fallbacks) == bool(state.reason)
    assert got[1].keys() == want[1].keys()
    if want[1]:
        assert relative_error(got[1], want[1]) < 1e-9
        per_example = per_example_grads(model, engine="vmap")(trainable(model), **BATCH)
        assert relative_error(per_example, model_loop_gradients(twin, **BATCH)) < 1e-9


def test_mica_is_fused_where_peft_has_it() -> None:
    pytest.importorskip("peft.tuners.lora.variants", reason="this PEFT has no LoRA variants")
    from peft.tuners.lora import variants

    if not hasattr(variants, "MiCALinearVariant"):
        pytest.skip("this PEFT has no MiCA")
    model = peft_model(init_lora_weights="mica")
    twin = copy.deepcopy(model)
    patch(model)
    got, want = gradients(model), gradients(twin)
    assert fused(got[0]) == EVERYTHING
    assert not any("lora_B" in name for name in got[1])
    assert relative_error(got[1], want[1]) < 1e-9


def test_dropout_is_drawn_as_peft_draws_it() -> None:
    model, twin = patched_and_twin(State({"lora_dropout": 0.5}, nothing, {}))
    results = []
    for each in (model, twin):
        torch.manual_seed(3)
        results.append(gradients(each))
    assert fused(results[0][0]) == {}
    assert torch.equal(results[0][0], results[1][0])
    assert relative_error(results[0][1], results[1][1]) < 1e-9
    assert {f.reason for f in patch_report(model).fallbacks} >= {"LoRA dropout is active"}


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mistral", "gpt2"])
def test_disabled_adapters_leave_the_base_bitwise(model_type: str) -> None:
    model, twin = patched_and_twin(State({}, nothing, {}, model_type=model_type))
    base = twin.unload()
    with model.disable_adapter(), torch.no_grad():
        disabled = model(**BATCH).logits
    with torch.no_grad():
        assert torch.equal(disabled, base(**BATCH).logits)
    assert fused(gradients(model)[0])


def test_switching_back_and_forth() -> None:
    model, twin = patched_and_twin(State({}, second_adapter, {}))
    for adapter in ("default", "other", "default"):
        for each in (model, twin):
            each.set_adapter(adapter)
        got, want = gradients(model), gradients(twin)
        assert fused(got[0]) == EVERYTHING
        assert relative_error(got[1], want[1]) < 1e-9


def test_adapter_names_of_a_mixed_batch_reach_peft() -> None:
    model, twin = patched_and_twin(State({}, second_adapter, {}))
    names = ["default", "other", "__base__"]
    with torch.no_grad():
        got, want = (each.eval()(**BATCH, adapter_names=names).logits for each in (model, twin))
    torch.testing.assert_close(got, want)


def test_unloading_after_patching() -> None:
    model, twin = patched_and_twin(State({}, nothing, {}))
    with torch.no_grad():
        want = twin(**BATCH).logits
        torch.testing.assert_close(model.merge_and_unload()(**BATCH).logits, want)


def test_a_hook_that_writes_into_the_shared_input() -> None:
    model, twin = patched_and_twin(State({}, nothing, {}))
    for each in (model, twin):
        layer(each).self_attn.k_proj.register_forward_pre_hook(halve_in_place)
    with torch.no_grad():
        assert torch.equal(model(**BATCH).logits, twin(**BATCH).logits)


@pytest.mark.parametrize("loss_only", [False, True])
def test_an_adapter_on_the_head_is_fused_under_the_patch_of_the_head(loss_only: bool) -> None:
    model = peft_model(target_modules=["lm_head", "q_proj"])
    twin = copy.deepcopy(model)
    apply_model_patches(model)
    loss = model(**BATCH, loss_only=loss_only).loss
    assert fused(loss) == {"qkv": 2, "w": 1}
    torch.testing.assert_close(loss, twin(**BATCH).loss)
    reasons = [fallback.reason for fallback in patch_report(model).fallbacks]
    assert [reason for reason in reasons if "loss_only" not in reason] == []
    got = per_example_grads(model, engine="batched")(trainable(model), **BATCH)
    # the loss itself is float32
    assert relative_error(got, model_loop_gradients(twin, **BATCH)) < 5e-6


def test_an_adapter_added_to_a_patched_projection_is_fused_by_the_next_call() -> None:
    model, twin = patched_and_twin(State({"target_modules": ["q_proj", "v_proj"]}, nothing, {}))
    for each in (model, twin):
        each.add_adapter("wider", LoraConfig(r=2, target_modules=["q_proj", "k_proj", "v_proj"]))
        randomised(each.double())
        each.set_adapter("wider")
    patch(model)
    got, want = gradients(model), gradients(twin)
    assert fused(got[0]) == {"w": 6}
    assert relative_error(got[1], want[1]) < 1e-9


@pytest.mark.parametrize("weights", ["shared", "stacked"])
def test_the_gradient_of_a_base_weight_taken_outside_of_vmap(weights: str) -> None:
    """One model or several: whoever differentiates a base weight around vmap gets its gradient."""
    model = peft_model(target_modules=["q_proj", "gate_proj"])
    name = "base_model.model.model.layers.1.mlp.gate_proj.base_layer.weight"
    other = "base_model.model.model.layers.1.self_attn.q_proj.base_layer.weight"
    own = dict(model.named_parameters())
    stack = (lambda w: torch.stack([w, 0.5 * w, 2 * w])) if weights == "stacked" else torch.clone
    params = {n: stack(own[n].detach()).requires_grad_() for n in (name, other)}

    def loss(given: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, given, (), {"input_ids": ids, "labels": labels}).loss

    mapped = torch.func.vmap(loss, (0 if weights == "stacked" else None, 0, 0))
    ids = BATCH["input_ids"]
    want = [
        torch.autograd.grad(loss({n: p[i] if weights == "stacked" else p for n, p in params.items()}, row, row), p)[0]
        for p in params.values()
        for i, row in enumerate(ids[:, None])
    ]
    patch(model)
    got = torch.autograd.grad(mapped(params, ids, ids).sum(), list(params.values()))
    again = torch.func.grad(lambda given: mapped(given, ids, ids).sum())(params)
    for g, a, w in zip(got, again.values(), (want[:3], want[3:]), strict=True):
        torch.testing.assert_close(g, sum(w), rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(a, g, rtol=1e-6, atol=1e-9)
