"""The look at a model: nothing that matters changes unseen, and a step of either engine is no change."""

import copy
import gc
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from opake.checkpoint import selective_checkpointing
from opake.functional import clipped_grad, watch
from opake.functional.watch import Watch
from opake.patches import apply_model_patches, patch_report, restore

V = 23


@pytest.fixture
def model():
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
    )
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config)
    model = get_peft_model(base, LoraConfig(r=2, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"))
    apply_model_patches(model)
    return model.train()


def layer(model):
    return model.base_model.model.model.layers[0]


def put_config(model):
    model.base_model.model.config._attn_implementation = "eager"


def move_data(model):
    weight = layer(model).mlp.gate_proj.base_layer.weight
    weight.data = weight.data.clone()


def replace_parameter(model):
    norm = layer(model).input_layernorm
    norm.weight = nn.Parameter(norm.weight.detach().clone())


def swap_class(model):
    norm = layer(model).input_layernorm
    norm.__class__ = type("Other", (type(norm),), {})


@pytest.mark.parametrize("options", [{}, {"part": "attention"}, {"part": "mlp"}], ids=str)
def test_a_policy_is_a_change_until_it_is_undone(model, options):
    watch = Watch(model)
    token, before = watch.token(), watch.state()
    policy = selective_checkpointing(model, **options)
    assert watch.token() is not token
    assert watch.state() != before
    policy.undo()
    watch.token()
    assert watch.state() == before


CHANGES = {
    "eval": lambda m: m.eval(),
    "one module in eval": lambda m: layer(m).mlp.eval(),
    "dropout": lambda m: layer(m).self_attn.q_proj.lora_dropout.update({"default": nn.Dropout(0.1)}),
    "scaling": lambda m: layer(m).mlp.up_proj.scaling.update({"default": 3.5}),
    "hook": lambda m: layer(m).register_forward_hook(lambda *_: None),
    "pre-hook": lambda m: layer(m).register_forward_pre_hook(lambda *_: None),
    "forward": lambda m: setattr(layer(m), "forward", layer(m).forward),
    "module": lambda m: layer(m).add_module("extra", nn.Linear(2, 2)),
    "module replaced": lambda m: setattr(layer(m), "mlp", copy.deepcopy(layer(m).mlp)),
    "parameter": replace_parameter,
    "data": move_data,
    "config": put_config,
    "class": swap_class,
    "second adapter": lambda m: m.add_adapter("second", m.peft_config["default"]),
    "merge": lambda m: m.merge_adapter(),
    "restore": lambda m: restore(m),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(model, change):
    watch = Watch(model)
    before = watch.token()
    assert watch.token() is before
    CHANGES[change](model)
    after = watch.token()
    assert after is not before
    assert watch.token() is after


def test_a_state_is_equal_again_when_everything_is_as_before(model):
    watch = Watch(model)
    first = watch.state()
    norm = layer(model).input_layernorm
    epsilon = norm.variance_epsilon
    for change, back in (
        (lambda: model.eval(), lambda: model.train()),
        (lambda: setattr(norm, "variance_epsilon", 1.0), lambda: setattr(norm, "variance_epsilon", epsilon)),
        (lambda: model.disable_adapter_layers(), lambda: model.enable_adapter_layers()),
    ):
        change()
        watch.token()
        other = watch.state()
        assert other != first
        back()
        watch.token()
        assert watch.state() == first
        assert hash(watch.state()) == hash(first)
        assert watch.state() != other


def test_a_state_keeps_nothing_alive_and_never_equals_a_newcomer(model):
    layer(model).extra = nn.Identity()
    watch, told = Watch(model), weakref.ref(layer(model).extra)
    first = watch.state()
    layer(model).extra = nn.Identity()
    watch.token()
    gc.collect()
    assert told() is None
    assert watch.state() != first


def test_a_forward_of_a_class_is_seen(model, monkeypatch):
    watch = Watch(model)
    before = watch.token()
    kind = type(layer(model).input_layernorm)
    monkeypatch.setattr(kind, "forward", lambda self, x: x)
    assert watch.token() is not before


@pytest.mark.parametrize("engine", ["vmap", "batched"])
def test_steps_and_new_values_are_no_change(model, engine):
    watch, f = Watch(model), clipped_grad(model, clip_norm=1.0, engine=engine)
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    ids = torch.randint(0, V, (3, 6))
    f(params, input_ids=ids, labels=ids)
    before = watch.token()
    for p in params.values():
        p.add_(0.01)
    f(params, input_ids=ids, labels=ids)
    assert watch.token() is before


def test_places_follow_a_replaced_tensor(model):
    watch = Watch(model)
    first = watch.places()
    assert watch.places() is first
    replace_parameter(model)
    weight = layer(model).input_layernorm.weight
    assert any(t is weight for t in watch.places().tensors)


@pytest.mark.parametrize("engine", ["batched", "vmap"])
def test_a_microbatch_is_looked_at_once(model, engine, monkeypatch):
    looks = []
    changed = watch._Look.changed
    monkeypatch.setattr(watch._Look, "changed", lambda look: looks.append(look) or changed(look))
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    ids = torch.randint(0, V, (6, 5))
    step = clipped_grad(model, clip_norm=1.0, engine=engine, microbatch_size=2)
    want = step(params, input_ids=ids, labels=ids)
    looks.clear()
    step(params, input_ids=ids, labels=ids)
    assert len(looks) == 3

    # what is replaced after the forward of the first microbatch is seen by the second
    spare = copy.deepcopy(layer(model).mlp)

    def replace(*_):
        hook.remove()
        layer(model).mlp = spare

    hook = model.register_forward_hook(replace)
    got = step(params, input_ids=ids, labels=ids)
    assert layer(model).mlp is spare
    assert all(torch.equal(got.grads[name], want.grads[name]) for name in want.grads)


def test_a_new_report_is_a_change(model):
    watch = Watch(model)
    token, state = watch.token(), watch.state()
    apply_model_patches(model)
    assert watch.token() is not token
    assert watch.state() != state


@pytest.mark.parametrize("engine", ["vmap", "auto"])
def test_counting_fall_backs_is_no_change(model, engine):
    layer(model).mlp.up_proj.lora_dropout["default"] = nn.Dropout(0.1)
    watch, f = Watch(model), clipped_grad(model, clip_norm=1.0, engine=engine)
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    ids = torch.randint(0, V, (3, 6))
    f(params, input_ids=ids, labels=ids)
    assert any(fallback.count for fallback in patch_report(model).fallbacks)
    before, state = watch.token(), watch.state()
    f(params, input_ids=ids, labels=ids)
    assert watch.token() is before
    assert watch.state() == state
