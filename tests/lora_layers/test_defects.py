"""What kernel patches of this kind got wrong elsewhere, one test each, with what is right."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import config as lora_config
from torch.func import functional_call, grad, vmap

from opake.functional import per_example_grads
from opake.lora.axolotl import apply_lora_kernel_patches, kernel_report
from opake.testing.oracle import model_loop_gradients, relative_error

from .peft_models import (
    ALL,
    EMBEDDING,
    EVERYTHING,
    LINEAR,
    MLP,
    QKV,
    O,
    assert_same,
    layer,
    pair,
    peft_model,
    reasons,
)
from .subjects import BATCH, fused, gradients, patch, randomised, trainable


def test_1_the_embedding_switch_alone_does_something() -> None:
    model, twin = pair(cfg={EMBEDDING: True}, target_modules=["embed_tokens", "q_proj"])
    assert [row.site for row in kernel_report(model).rows if row.state == "applied"] == ["model.embed_tokens"]
    embedding = model.base_model.model.model.embed_tokens
    assert embedding(BATCH["input_ids"]).grad_fn.name().startswith(("View", "UnsafeView", "Reshape"))
    assert_same(model, twin, {})
    assert kernel_report(model).fallbacks == ()


@pytest.mark.parametrize("act", ["gelu_pytorch_tanh", "gelu", "silu", "gelu_new"])
def test_2_the_activation_is_the_model_s_own(act: str) -> None:
    model, twin = pair("gemma3_text", {"hidden_activation": act})
    assert_same(model, twin, EVERYTHING)


@pytest.mark.parametrize("model_type", ["gemma3_text", "gemma", "llama"])
def test_3_a_scaled_embedding_keeps_its_scale(model_type: str) -> None:
    model, twin = pair(model_type, cfg={EMBEDDING: True, QKV: True}, target_modules=["embed_tokens", "v_proj"])
    assert_same(model, twin)
    ids = BATCH["input_ids"]
    got, want = (each.base_model.model.model.embed_tokens(ids) for each in (model, twin))
    torch.testing.assert_close(got, want)
    assert kernel_report(model).fallbacks == ()


def test_4_a_layer_without_the_active_adapter_is_the_base() -> None:
    model = peft_model(target_modules=["q_proj", "up_proj"], layers_to_transform=[0])
    model.add_adapter("other", LoraConfig(r=3, target_modules=LINEAR, layers_to_transform=[1]))
    randomised(model.double())
    twin = copy.deepcopy(model)
    apply_lora_kernel_patches(model, ALL)
    for name in ("default", "other", "default"):
        for each in (model, twin):
            each.set_adapter(name)
        assert_same(model, twin)


def test_5_dropout_is_not_fused_and_every_projection_has_its_own_mask() -> None:
    model = peft_model(lora_dropout=0.5)
    twin = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=r"LoRA dropout \(p=0\.5.*set lora_dropout: 0") as caught:
        apply_lora_kernel_patches(model, ALL)
    assert len(caught) == 3, "one for each switch"
    results = []
    for each in (model, twin):
        torch.manual_seed(3)
        results.append(gradients(each))
    assert fused(results[0][0]) == {}
    assert torch.equal(results[0][0], results[1][0])
    assert relative_error(results[0][1], results[1][1]) < 1e-9
    assert any("LoRA dropout" in reason for reason in reasons(model))
    for each in (model, twin):
        each.eval()
    assert_same(model, twin, {})


@pytest.mark.parametrize("what", ["mlp.down_proj", "self_attn.k_proj"])
def test_5_dropout_of_a_single_projection_is_not_lost(what: str) -> None:
    model = peft_model()
    layer(model).get_submodule(what).lora_dropout["default"] = torch.nn.Dropout(0.5)
    twin = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="LoRA dropout"):
        apply_lora_kernel_patches(model, ALL)
    results = []
    for each in (model, twin):
        torch.manual_seed(3)
        results.append(gradients(each))
    torch.testing.assert_close(results[0][0], results[1][0])
    assert relative_error(results[0][1], results[1][1]) < 1e-9
    assert fused(results[0][0])


@pytest.mark.parametrize("shape", [(6, 32), (32,), (2, 3, 4, 32), (0, 32)])
def test_6_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    model, twin = pair()
    x = torch.randn(shape, dtype=torch.float64)
    for name in ("mlp", "self_attn.q_proj", "self_attn.o_proj"):
        outs = [layer(each).get_submodule(name)(x) for each in (model, twin)]
        torch.testing.assert_close(*outs)
        adapters = [
            [p for n, p in layer(each).get_submodule(name).named_parameters() if "lora_" in n] for each in (model, twin)
        ]
        grads = [torch.autograd.grad(out.sin().sum(), ps) for out, ps in zip(outs, adapters, strict=True)]
        torch.testing.assert_close(*grads)


def test_6_gradients_that_are_not_contiguous() -> None:
    model, twin = pair()
    x, upstream = torch.randn(2, 5, 32, dtype=torch.float64), torch.randn(32, 5, 2, dtype=torch.float64).mT.mT
    for name in ("mlp", "self_attn.q_proj"):
        found = []
        for each in (model, twin):
            module = layer(each).get_submodule(name)
            ps = [p for n, p in module.named_parameters() if "lora_" in n]
            found.append(torch.autograd.grad(module(x), ps, upstream.permute(2, 1, 0)))
        torch.testing.assert_close(*found)


def test_7_feed_forward_of_llama4_dense_and_shared_and_not_the_router() -> None:
    model, twin = pair("llama4_text", target_modules=r".*(self_attn|shared_expert|feed_forward)\.[a-z]*_proj")
    applied = kernel_report(model).find(record="KernelMLP", state="applied")
    assert [row.site for row in applied] == [f"model.layers.{i}.feed_forward.shared_expert" for i in (0, 1)]
    assert_same(model, twin, EVERYTHING)
    dense, stock = pair("llama4_text", {"moe_layers": []}, target_modules=r".*\.[a-z]*_proj")
    applied = kernel_report(dense).find(record="KernelMLP", state="applied")
    assert [row.site for row in applied] == [f"model.layers.{i}.feed_forward" for i in (0, 1)]
    assert_same(dense, stock, EVERYTHING)


@pytest.mark.parametrize("bias", ["lora_only", "all"])
def test_8_a_trained_base_bias_gets_its_gradient(bias: str) -> None:
    model = peft_model("qwen2", bias=bias)
    twin = copy.deepcopy(model)
    with pytest.warns(UserWarning, match='the base bias is trainable; use bias="none"'):
        apply_lora_kernel_patches(model, ALL)
    assert any(name.endswith("q_proj.base_layer.bias") for name in trainable(model))
    assert_same(model, twin, {"mlp": 2, "w": 2})


def test_8_a_bias_of_the_adapter_gets_its_gradient() -> None:
    model = peft_model(lora_bias=True)
    twin = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="has a bias; its projections are fused one by one"):
        apply_lora_kernel_patches(model, ALL)
    assert any(name.endswith("q_proj.lora_B.default.bias") for name in trainable(model))
    assert_same(model, twin, {"qkv": 2, "w": 8})


def doubled(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return 2 * output


@pytest.mark.parametrize("then", [False, True], ids=["before", "after"])
def test_9_a_trained_base_weight_gets_its_gradient(then: bool) -> None:
    model = peft_model()
    weights = ["self_attn.q_proj.base_layer.weight", "mlp.up_proj.base_layer.weight"]
    if not then:
        for name in weights:
            layer(model).get_parameter(name).requires_grad_()
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        apply_lora_kernel_patches(model, ALL)
    if then:
        for each in (model, twin):
            for name in weights:
                layer(each).get_parameter(name).requires_grad_()
    assert_same(model, twin, {"qkv": 1, "mlp": 1, "w": 6})


@pytest.mark.parametrize("what", ["", ".base_layer", ".lora_A.default", ".lora_B.default"])
@pytest.mark.parametrize("of", ["self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj"])
def test_9_hooks_run(of: str, what: str) -> None:
    model, twin = pair()
    for each in (model, twin):
        layer(each).get_submodule(of + what).register_forward_hook(doubled)
    assert_same(model, twin)


def test_9_saved_modules_are_trained() -> None:
    targets = [name for name in LINEAR if name != "down_proj"]
    model, twin = pair(target_modules=targets, modules_to_save=["down_proj", "norm"])
    assert any("down_proj.modules_to_save" in name for name in trainable(model))
    assert_same(model, twin, {"qkv": 2, "w": 6})


def variant(name: str, **settings: Any) -> dict[str, Any]:
    """The option of a LoraConfig that switches a variant on; empty where the installed PEFT does not have it."""
    option = {"KasaConfig": "kasa_config", "VeloraConfig": "velora_config"}.get(name)
    option = option or {"MontecloraConfig": "monteclora_config", "BdLoraConfig": "use_bdlora"}[name]
    cls = getattr(lora_config, name, None)
    return {} if cls is None else {option: cls(**settings)}


VARIANTS: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "DoraLinearVariant"),
    "dora with dropout": ({"use_dora": True, "lora_dropout": 0.5}, r"DoraLinearVariant|LoRA dropout \(p=0\.5"),
    "activated": ({"alora_invocation_tokens": [5]}, "ALoraLinearVariant"),
    "singular values": (variant("KasaConfig"), "KasaLinearVariant"),
    "velora": (variant("VeloraConfig"), "VeloraLinearVariant"),
    "monte carlo": (variant("MontecloraConfig"), "MontecloraLinearVariant"),
    "block diagonal": (variant("BdLoraConfig", match_strict=False, target_modules_bd_a=["q_proj"]), "BdLoraLinearV"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_10_variants_are_left_to_peft(name: str) -> None:
    options, message = VARIANTS[name]
    if not options:
        pytest.skip("this PEFT does not have the variant")
    model = peft_model(**options)
    twin = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=message):
        apply_lora_kernel_patches(model, ALL)
    results = []
    for each in (model, twin):
        torch.manual_seed(3)
        results.append(gradients(each))
    torch.testing.assert_close(results[0][0], results[1][0])
    assert relative_error(results[0][1], results[1][1]) < 1e-9
    assert fused(results[0][0]) == {}


def test_10_adalora_is_no_lora() -> None:
    from peft import AdaLoraConfig, get_peft_model

    from .subjects import double_model

    config = AdaLoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", total_step=10)
    model = get_peft_model(double_model("llama"), config).double()
    twin = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=r"lora\.SVDLinear keeps PEFT's forward"):
        apply_lora_kernel_patches(model, {QKV: True})
    with torch.no_grad():
        assert torch.equal(model(**BATCH).logits, twin(**BATCH).logits)


def test_11_adapter_names_of_a_mixed_batch_reach_peft() -> None:
    model = peft_model()
    model.add_adapter("other", LoraConfig(r=3, target_modules=LINEAR))
    randomised(model.double())
    twin = copy.deepcopy(model)
    apply_lora_kernel_patches(model, ALL)
    names = ["default", "other", "__base__"]
    with torch.no_grad():
        got, want = (each.eval()(**BATCH, adapter_names=names).logits for each in (model, twin))
    torch.testing.assert_close(got, want)
    assert not torch.allclose(want, twin(**BATCH).logits)


@pytest.mark.parametrize("cfg", [ALL, {QKV: True}, {O: True}, {MLP: True}, {EMBEDDING: True}], ids=str)
def test_12_transforms_of_torch_func(cfg: dict[str, bool]) -> None:
    model, twin = pair(cfg=cfg, target_modules=[*LINEAR, "embed_tokens"])
    params = {name: p.detach() for name, p in trainable(model).items()}
    ids, width = BATCH["input_ids"][:, :6], twin.config.vocab_size

    def loss(params: Any, row: torch.Tensor) -> torch.Tensor:
        # no mask, no cache, eager attention: what stock Transformers can do under a transform
        logits = functional_call(model, params, (), {"input_ids": row[None], "use_cache": False}).logits
        return torch.nn.functional.cross_entropy(logits[0, :-1].view(-1, width), row[1:])

    model.base_model.model.set_attn_implementation("eager")
    twin.base_model.model.set_attn_implementation("eager")
    got = vmap(grad(loss), in_dims=(None, 0))(params, ids)
    rows = [torch.autograd.grad(twin_loss(twin, row, width), list(trainable(twin).values())) for row in ids]
    want = {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(params)}
    assert relative_error(got, want) < 1e-9


def twin_loss(twin: Any, row: torch.Tensor, width: int) -> torch.Tensor:
    logits = twin(input_ids=row[None], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[0, :-1].view(-1, width), row[1:])


@pytest.mark.parametrize("first", ["kernels", "patches"])
def test_12_per_example_gradients_beside_the_model_patches(first: str) -> None:
    model = peft_model()
    want = model_loop_gradients(model, **BATCH)
    steps = {"kernels": lambda: apply_lora_kernel_patches(model, ALL), "patches": lambda: patch(model)}
    for step in (first, *(steps.keys() - {first})):
        steps[step]()
    assert fused(gradients(model)[0]) == EVERYTHING
    for engine in ("vmap", "batched"):
        assert relative_error(per_example_grads(model, engine=engine)(trainable(model), **BATCH), want) < 1e-9
