"""`apply_lora`: which layers it finds, what it freezes, and that everything can be taken off again."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.func import functional_call

from opake.checking.tiny import tiny_model
from opake.errors import InputError, PatchError, UnsupportedModel
from opake.functional import clipped_grad, make_functional, per_example_grads
from opake.lora import (
    AdapterWrapper,
    CanonicalAdapter,
    LinearAdapter,
    LoRALinear,
    LoRATopKRouter,
    apply_lora,
    disable_adapter,
    merge_lora,
    remove_lora,
)
from opake.patches import patch_report, restore
from opake.testing.oracle import model_loop_gradients, relative_error
from opake.testing.snapshot import differences, model_snapshot

from .subjects import BATCH, double_model, fused, gradients, loop_and_vmap, patch, randomised, trainable

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


def adapted(model: Any) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules() if isinstance(module, AdapterWrapper)}


@pytest.mark.parametrize(
    ("targets", "count", "sample"),
    [
        ("q_proj", 2, "model.layers.1.self_attn.q_proj"),
        (["q_proj", "mlp.up_proj"], 4, "model.layers.0.mlp.up_proj"),
        ("model.layers.0.self_attn.q_proj", 1, "model.layers.0.self_attn.q_proj"),
        ("layers.1.*.?_proj", 4, "model.layers.1.self_attn.o_proj"),
        ("*.layers.0.*proj", 7, "model.layers.0.mlp.down_proj"),
        ("layers.[1]*.down_proj", 1, "model.layers.1.mlp.down_proj"),
        (re.compile(r"model\.layers\.\d\.self_attn\.(q|v)_proj"), 4, "model.layers.0.self_attn.v_proj"),
        ({"lm_head", "q_proj"}, 3, "lm_head"),
        ("all-linear", 14, "model.layers.0.mlp.gate_proj"),
    ],
)
def test_targets(targets: Any, count: int, sample: str) -> None:
    model = tiny_model("llama")
    assert apply_lora(model, targets) is model
    found = adapted(model)
    assert len(found) == count
    assert found[sample] is LoRALinear
    names = {f"{name}.adapter.linear_{part}.weight" for name in found for part in ("in", "out")}
    assert set(trainable(model)) == names, "everything else is frozen"


def test_exclusions_and_patterns() -> None:
    model = tiny_model("llama")
    apply_lora(
        model,
        "all-linear",
        4,
        8,
        exclude=["mlp.*", re.compile(r".*\.1\..*o_proj")],
        dim_pattern={"layers.0.*.q_proj": 2, "q_proj": 3},
        alpha_pattern={"v_proj": 1.5},
    )
    found = {name: module.adapter for name, module in model.named_modules() if isinstance(module, AdapterWrapper)}
    assert len(found) == 7
    assert {name: a.dim for name, a in found.items() if "q_proj" in name} == {
        "model.layers.0.self_attn.q_proj": 2,
        "model.layers.1.self_attn.q_proj": 3,
    }
    assert {a.alpha for name, a in found.items() if "v_proj" in name} == {1.5}
    assert {a.scale for name, a in found.items() if "k_proj" in name} == {2.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"targets": "q_porj"}, "did you mean 'q_proj'"),
        ({"targets": ["q_proj", "w1"]}, "named by 'w1'; its linear layers end in down_proj"),
        ({"targets": re.compile("q_proj")}, "named by 'q_proj'; a compiled pattern must match the whole name"),
        ({"targets": re.compile("w1")}, "named by 'w1'; its linear layers end in"),
        ({"targets": 3}, "it takes names, wildcards or compiled patterns"),
        ({"targets": "embed_tokens"}, "is an embedding"),
        ({"targets": "self_attn"}, "is a LlamaAttention, which is neither a linear layer nor a router"),
        ({"targets": "q_proj", "exclude": "layers.*"}, "is excluded"),
        ({"targets": "q_proj", "dim": 0}, "dim=0"),
        ({"targets": "q_proj", "dim_pattern": {"layers.1.*": -1}}, "dim=-1"),
        ({"targets": "q_proj", "dropout_position": "last"}, "dropout_position='last'"),
        ({"targets": "q_proj", "canonical": "yes"}, "canonical='yes'"),
    ],
)
def test_a_wrong_call_changes_nothing(arguments: dict[str, Any], message: str) -> None:
    model = tiny_model("llama")
    before, states = model_snapshot(model), [p.requires_grad for p in model.parameters()]
    with pytest.raises(InputError, match=message):
        apply_lora(model, **arguments)
    assert list(differences(before, model_snapshot(model))) == []
    assert [p.requires_grad for p in model.parameters()] == states


def test_other_models_are_named_in_the_refusal() -> None:
    base = tiny_model("llama")
    with pytest.raises(UnsupportedModel, match="PeftModelForCausalLM wraps a LlamaForCausalLM"):
        apply_lora(get_peft_model(copy.deepcopy(base), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")))
    with pytest.raises(UnsupportedModel, match="expected a model"):
        apply_lora("llama")  # type: ignore[type-var]
    patch(base)
    with pytest.raises(UnsupportedModel, match="restore"):
        apply_lora(base)
    restore(base)
    apply_lora(base, "q_proj")
    patch(base)
    with pytest.raises(UnsupportedModel, match="restore"):
        remove_lora(base)


def test_twice() -> None:
    model = tiny_model("llama")
    apply_lora(model, "q_proj")
    with pytest.raises(InputError, match=r"q_proj has an adapter already.*remove_lora"):
        apply_lora(model, ["q_proj", "v_proj"])
    assert len(adapted(model)) == 2
    apply_lora(model, "v_proj")
    assert len(adapted(model)) == 4
    assert len(trainable(model)) == 8, "the first adapters are still trained"
    with pytest.raises(InputError, match="named by 'linear_in'"):
        apply_lora(model, "linear_in")


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral", "phi3"])
def test_taking_off_gives_the_very_layers_back(model_type: str) -> None:
    model = tiny_model(model_type)
    model.get_input_embeddings().requires_grad_(False)
    before, states = model_snapshot(model), [p.requires_grad for p in model.parameters()]
    apply_lora(model, "all-linear")
    assert list(differences(before, model_snapshot(model)))
    remove_lora(model)
    assert list(differences(before, model_snapshot(model))) == []
    assert [p.requires_grad for p in model.parameters()] == states
    assert remove_lora(model) is model


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen2", "mixtral"])
def test_merging(model_type: str) -> None:
    model = double_model(model_type)
    targets = ["q_proj", "gate"] if model_type == "mixtral" else "all-linear"
    apply_lora(model, targets)
    randomised(model)
    want = model(**BATCH).logits
    assert merge_lora(model) is model
    assert adapted(model) == {}
    torch.testing.assert_close(model(**BATCH).logits, want)
    with pytest.raises(PatchError, match="no adapters"):
        merge_lora(model)


def test_a_shared_weight_is_not_merged() -> None:
    model = randomised(apply_lora(tiny_model("llama", tie_word_embeddings=True), ["lm_head", "q_proj"]))
    weights = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(PatchError, match=r"lm_head\.weight is shared with model\.embed_tokens"):
        merge_lora(model)
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert len(adapted(model)) == 3


def test_switching_off() -> None:
    stock = double_model("llama")
    model = randomised(apply_lora(copy.deepcopy(stock)))
    with disable_adapter(model):
        assert torch.equal(model(**BATCH).logits, stock(**BATCH).logits)
        with pytest.raises(ZeroDivisionError), disable_adapter(model):
            _ = 1 // 0
        assert torch.equal(model(**BATCH).logits, stock(**BATCH).logits), "an inner block does not enable"
    assert not torch.allclose(model(**BATCH).logits, stock(**BATCH).logits)


def test_names_of_the_base_are_unchanged_and_its_checkpoint_loads() -> None:
    stock = tiny_model("llama", seed=3)
    model = randomised(apply_lora(tiny_model("llama")))
    names = [name for name in model.state_dict() if ".adapter." not in name]
    assert names == list(stock.state_dict())
    assert [n for n, _ in model.named_parameters() if ".adapter." not in n] == [n for n, _ in stock.named_parameters()]
    model.load_state_dict(stock.state_dict())
    with disable_adapter(model):
        assert torch.equal(model(**BATCH).logits, stock(**BATCH).logits)
    other = apply_lora(tiny_model("llama"))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(**BATCH).logits, model(**BATCH).logits)


def test_transformers_saves_and_loads_the_base(tmp_path: Any) -> None:
    model = randomised(apply_lora(tiny_model("llama")))
    model.save_pretrained(tmp_path)
    from safetensors import safe_open

    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(model.state_dict()) - {"lm_head.weight"} | (
            {"lm_head.weight"} & set(file.keys())
        )


def test_tied_embeddings_stay_tied() -> None:
    model = apply_lora(tiny_model("llama", tie_word_embeddings=True), ["lm_head"])
    assert model.lm_head.to_wrap.weight is model.model.embed_tokens.weight
    model.tie_weights()
    assert model.lm_head.to_wrap.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight is not model.lm_head.to_wrap.weight


def test_a_shared_layer_is_wrapped_once_at_every_place() -> None:
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.Linear(4, 4))})
    apply_lora(model, "a")
    assert model["a"] is model["b"][0]
    assert isinstance(model["a"], LoRALinear)


def test_plain_modules() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    apply_lora(model, ["0", "2"], dim=2)
    loop, got = loop_and_vmap(randomised(model), torch.randn(4, 3, 6, dtype=torch.float64))
    assert relative_error(got, loop) < 1e-9
    fmodel, params, _ = make_functional(model, partition_trainable=True)
    assert set(params) == set(loop)
    x = torch.randn(3, 6, dtype=torch.float64)
    torch.testing.assert_close(fmodel(params, x), model(x))


FAMILIES = {
    "llama": {"qkv": 2, "mlp": 2, "w": 2},
    "qwen2": {"qkv": 2, "mlp": 2, "w": 2},
    "gemma3_text": {"qkv": 2, "mlp": 2, "w": 2},
    "phi3": {"mlp": 2, "w": 4},
    "gpt2": {"w": 8},
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_patched_models_fuse_these_layers_as_they_do_those_of_peft(model_type: str) -> None:
    model = randomised(apply_lora(double_model(model_type)))
    loss, alone = gradients(model)
    assert set(fused(loss)) == {"w"}, "fused one by one without any patch"
    want = model_loop_gradients(model, **BATCH)
    patch(model)
    loss, got = gradients(model)
    assert fused(loss) == FAMILIES[model_type]
    assert patch_report(model).fallbacks == ()
    assert relative_error(got, alone) < 1e-9
    engines = ("vmap", "batched") if model_type != "gpt2" else ("vmap",)
    for engine in engines:
        assert relative_error(per_example_grads(model, engine=engine)(trainable(model), **BATCH), want) < 1e-9
    restore(model)
    assert relative_error(gradients(model)[1], alone) < 1e-9


def test_the_fast_engine_is_chosen() -> None:
    model = randomised(apply_lora(double_model("llama")))
    patch(model)
    assert clipped_grad(model, clip_norm=1.0)(trainable(model), **BATCH).engine == "batched"
    dropping = apply_lora(double_model("llama"), dropout=0.5)
    patch(dropping)
    assert clipped_grad(dropping, clip_norm=1.0)(trainable(dropping), **BATCH).engine == "vmap"


def test_switched_off_while_patched() -> None:
    stock = double_model("llama")
    model = randomised(apply_lora(copy.deepcopy(stock)))
    patch(stock)
    patch(model)
    with disable_adapter(model), torch.no_grad():
        assert torch.equal(model(**BATCH).logits, stock(**BATCH).logits)
    assert fused(gradients(model)[0]) == FAMILIES["llama"]


def test_a_deep_copy_has_its_own() -> None:
    model = randomised(apply_lora(double_model("llama"), ["q_proj"]))
    twin = copy.deepcopy(model)
    want = model(**BATCH).logits
    remove_lora(model)
    assert torch.equal(twin(**BATCH).logits, want)
    remove_lora(twin)
    assert torch.equal(twin(**BATCH).logits, model(**BATCH).logits)
    assert all(p.requires_grad for p in twin.parameters())


def test_weights_are_read_at_the_call() -> None:
    model = randomised(apply_lora(double_model("llama")))
    zero = {name: torch.zeros_like(p) for name, p in trainable(model).items()}
    with disable_adapter(model):
        want = model(**BATCH).logits
    torch.testing.assert_close(functional_call(model, zero, (), BATCH).logits, want)
    assert not torch.allclose(model(**BATCH).logits, want)


def test_routers_by_their_names() -> None:
    model = apply_lora(tiny_model("mixtral"), ["gate", "q_proj"])
    assert set(adapted(model).values()) == {LoRALinear, LoRATopKRouter}
    assert adapted(apply_lora(tiny_model("mixtral"))).keys() == {
        f"model.layers.{i}.self_attn.{name}" for i in (0, 1) for name in ATTENTION
    }


class Router(nn.Module):
    """As some families have it: a router whose logits come from a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.num_experts = nn.Linear(6, 4, bias=False), 4

    def forward(self, x: torch.Tensor) -> Any:
        return self.gate(x).topk(2, -1)


def test_a_router_and_the_layer_in_it() -> None:
    model = nn.ModuleDict({"router": Router(), "mlp": nn.Sequential(nn.Linear(6, 6))})
    apply_lora(model, ["router", "gate"])
    assert adapted(model) == {"router": LoRATopKRouter}
    assert adapted(apply_lora(nn.ModuleDict({"router": Router()}), "router.gate")) == {"router.gate": LoRATopKRouter}


def test_canonical_parts() -> None:
    model = randomised(apply_lora(double_model("phi3"), ["q_proj", "v_proj", "up_proj", "o_proj"], canonical=True))
    found = {name: module for name, module in model.named_modules() if isinstance(module, AdapterWrapper)}
    qkv, mlp = found["model.layers.0.self_attn.qkv_proj"], found["model.layers.0.mlp.gate_up_proj"]
    assert isinstance(qkv.adapter, CanonicalAdapter)
    assert qkv.adapter.parts == {"q_proj": 32, "k_proj": 16, "v_proj": 16}
    assert [name for name, _ in qkv.adapter.named_children()] == ["q_proj", "v_proj"]
    assert [name for name, _ in mlp.adapter.named_children()] == ["up_proj"]
    assert isinstance(found["model.layers.0.self_attn.o_proj"].adapter, LinearAdapter)
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    delta = qkv(x) - qkv.to_wrap(x)
    torch.testing.assert_close(delta[..., :32], qkv.adapter.q_proj(x))
    assert torch.equal(qkv(x)[..., 32:48], qkv.to_wrap(x)[..., 32:48])
    torch.testing.assert_close(delta[..., 48:], qkv.adapter.v_proj(x))
    torch.testing.assert_close(nn.functional.linear(x, qkv.weight), qkv(x))
    want = model(**BATCH).logits
    torch.testing.assert_close(merge_lora(model)(**BATCH).logits, want)


@pytest.mark.parametrize("model_type", ["phi3", "gpt2"])
def test_canonical_adapters_have_per_example_gradients(model_type: str) -> None:
    model = randomised(apply_lora(double_model(model_type), canonical=True, dim_pattern={"q_proj": 3}))
    want = model_loop_gradients(model, **BATCH)
    patch(model)
    got = per_example_grads(model)(trainable(model), **BATCH)
    assert any("k_proj" in name for name in got)
    assert relative_error(got, want) < 1e-9


def test_canonical_where_the_layout_is_not_known() -> None:
    model = tiny_model("gpt_neox")
    with pytest.raises(
        InputError, match=r"how gpt_neox\.layers\.0\.attention.query_key_value lays its projections out"
    ):
        apply_lora(model, canonical=True)
    apply_lora(model, canonical=True, exclude="query_key_value")
    assert len(adapted(model)) == 6


def test_separate_layers_are_canonical_already() -> None:
    one, two = apply_lora(tiny_model("llama"), canonical=True), apply_lora(tiny_model("llama"))
    assert adapted(one) == adapted(two)
