"""The engine of a function that is kept: chosen anew when the model changes, and as before when it changes back."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrize

from opake.checking.tiny import tiny_batch, tiny_model
from opake.errors import EngineUnavailable
from opake.functional import clipped_grad, per_example_grads
from opake.patches import apply_model_patches
from opake.testing.oracle import relative_error

ENGINES = ("auto", "vmap", "batched")


def adapted(family="llama", **options):
    torch.manual_seed(0)
    options = {"target_modules": "all-linear", "r": 2, "init_lora_weights": False, **options}
    model = get_peft_model(tiny_model(family), LoraConfig(task_type="CAUSAL_LM", **options))
    apply_model_patches(model)
    return model.eval()


def trainable(model):
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def projection(model):
    return model.base_model.model.model.layers[0].self_attn.q_proj.base_layer


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def second_adapter(model):
    config = LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"], task_type="CAUSAL_LM")
    if "b" not in model.peft_config:
        model.add_adapter("b", config)
    model.base_model.set_adapter(["default", "b"])


CHANGES = {
    "dropout": (lambda m: m.train(), lambda m: m.eval()),
    "merged": (lambda m: m.merge_adapter(), lambda m: m.unmerge_adapter()),
    "disabled": (lambda m: m.disable_adapter_layers(), lambda m: m.enable_adapter_layers()),
    "several": (second_adapter, lambda m: m.base_model.set_adapter("default")),
    "parametrised": (
        lambda m: parametrize.register_parametrization(projection(m), "weight", Doubled()),
        lambda m: parametrize.remove_parametrizations(projection(m), "weight", leave_parametrized=False),
    ),
}
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


def check(model, change, back):
    """A change that the batched engine cannot follow, and its undoing, under functions that were used before."""
    batch, params = tiny_batch(), trainable(model)
    made = {engine: per_example_grads(model, engine=engine) for engine in ENGINES}
    step = clipped_grad(model, clip_norm=1.0)
    before = made["batched"](params, **batch)
    assert step(params, **batch).engine == "batched"
    made["auto"](params, **batch)
    change(model)
    torch.manual_seed(1)
    want = made["vmap"](params, **batch)
    torch.manual_seed(1)
    found = made["auto"](params, **batch)
    assert all(torch.equal(found[name], want[name]) for name in want)
    assert step(params, **batch).engine == "vmap"
    with pytest.raises(EngineUnavailable, match="without an example axis"):
        made["batched"](params, **batch)
    back(model)
    assert relative_error(made["batched"](params, **batch), before) < 1e-5
    out = step(params, **batch)
    assert out.engine == "batched", out.reason


@pytest.mark.filterwarnings("ignore:.*[Aa]dapter")
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_gets_the_engine_that_serves_it(change):
    check(adapted(lora_dropout=0.2), *CHANGES[change])


@pytest.mark.parametrize("implementation", ["batched_mm", "eager"])
def test_experts_set_to_another_implementation(implementation):
    model = adapted("mixtral", **EXPERTS)
    inner = model.base_model.model
    stock = inner.config._experts_implementation
    check(
        model,
        lambda _: inner.set_experts_implementation(implementation),
        lambda _: inner.set_experts_implementation(stock),
    )


def test_what_a_run_finds_out_is_about_the_model_as_it_was_then():
    shared = r".*shared_expert\.(gate|up|down)_proj"
    model = adapted("qwen2_moe", target_modules=shared)
    model.add_adapter("b", LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    step = clipped_grad(model, clip_norm=1.0)
    for adapter, engine, reason in (
        ("default", "vmap", "one dimension"),
        ("b", "batched", "rows are independent"),
        ("default", "vmap", "one dimension"),
    ):
        model.set_adapter(adapter)
        apply_model_patches(model)
        for _ in range(2):
            out = step(trainable(model), **tiny_batch())
            assert out.engine == engine
            assert reason in out.reason


def test_without_autograd_vmap_serves():
    model, batch = adapted(), tiny_batch()
    params = trainable(model)
    made = {engine: per_example_grads(model, engine=engine) for engine in ENGINES}
    step = clipped_grad(model, clip_norm=1.0)
    want = made["batched"](params, **batch)
    assert step(params, **batch).engine == "batched"
    with torch.inference_mode():
        for engine in ("auto", "vmap"):
            assert relative_error(made[engine](params, **batch), want) < 1e-5
        out = step(params, **batch)
        inside = {name: p.clone() for name, p in params.items()}
        with pytest.raises(EngineUnavailable, match="inference_mode"):
            made["batched"](params, **batch)
    assert out.engine == "vmap"
    assert "inference_mode" in out.reason
    # tensors that were made in it keep out of autograd for good
    assert relative_error(made["auto"](inside, **batch), want) < 1e-5
    with pytest.raises(EngineUnavailable, match="inference_mode"):
        made["batched"](inside, **batch)
    assert step(params, **batch).engine == "batched"
    with torch.no_grad():
        assert step(params, **batch).engine == "batched"


def test_a_model_made_without_autograd_is_served_by_vmap():
    with torch.inference_mode():
        model = adapted()
    params = {name: p.clone() for name, p in model.named_parameters() if "lora_" in name}
    assert not any(p.is_inference() for p in params.values())
    assert clipped_grad(model, clip_norm=1.0)(params, **tiny_batch()).engine == "vmap"
