"""`patch_self_attn_lora`: one class changes, every instance with adapters is fused, and nothing else is different."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from opake.checking.tiny import tiny_config, tiny_model
from opake.errors import PatchError, RestoreConflict
from opake.functional import per_example_grads
from opake.lora import apply_lora
from opake.lora.axolotl import apply_lora_kernel_patches, patch_self_attn_lora, restore
from opake.testing.oracle import model_loop_gradients, relative_error
from opake.testing.snapshot import differences, imported, library_snapshot, model_snapshot

from .peft_models import ALL, LINEAR, assert_same, layer, pair, peft_model
from .subjects import BATCH, checkpointing, double_model, fused, gradients, patch, randomised, trainable

LLAMA = {"qkv": 2, "w": 2}


@pytest.fixture
def cfg(tmp_path: Path) -> Iterator[dict[str, Any]]:
    tiny_config("llama").save_pretrained(tmp_path)
    yield {"base_model": str(tmp_path)}
    restore()


def configured(model_type: str, folder: Path) -> dict[str, Any]:
    tiny_config(model_type).save_pretrained(folder)
    return {"base_model": str(folder)}


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("llama", LLAMA),
        ("qwen3", LLAMA),
        ("gemma3_text", LLAMA),
        ("cohere", LLAMA),
        ("olmo2", LLAMA),
        ("gpt2", {"w": 4}),
        ("phi3", {"w": 4}),
        ("gpt_neox", {"w": 4}),
        ("mistral", LLAMA),
    ],
)
def test_every_instance_is_fused(model_type: str, expected: dict[str, int], tmp_path: Path) -> None:
    before, twin = peft_model(model_type), peft_model(model_type)
    want = gradients(twin)
    patch_self_attn_lora(configured(model_type, tmp_path))
    try:
        for model in (before, peft_model(model_type)):
            loss, got = gradients(model)
            assert fused(loss) == expected
            torch.testing.assert_close(loss, want[0])
            assert relative_error(got, want[1]) < 1e-9
    finally:
        restore()
    assert fused(gradients(before)[0]) == {}


def test_the_class_alone_changes(cfg: dict[str, Any]) -> None:
    models = [peft_model(), double_model("llama"), peft_model("mistral")]
    for model in models:
        gradients(model)
    modules = imported()
    libraries, snapshots = library_snapshot(modules), [model_snapshot(model) for model in models]
    stock = LlamaAttention.forward
    patch_self_attn_lora(cfg)
    for model in models:
        gradients(model)
    changed = list(differences(libraries, library_snapshot(modules)))
    assert len(changed) == 2
    assert all("LlamaAttention" in line for line in changed), changed
    for model, snapshot in zip(models, snapshots, strict=True):
        assert list(differences(snapshot, model_snapshot(model))) == []
    assert LlamaAttention._original_forward is stock
    assert LlamaAttention.forward.__wrapped__ is stock
    restore(LlamaAttention)
    assert list(differences(libraries, library_snapshot(modules))) == []
    assert LlamaAttention.forward is stock


def test_instances_without_adapters_compute_the_same_bits(cfg: dict[str, Any]) -> None:
    model = double_model("llama")
    want = model(**BATCH)
    patch_self_attn_lora(cfg)
    got = model(**BATCH)
    assert torch.equal(got.loss, want.loss)
    assert torch.equal(got.logits, want.logits)
    assert fused(got.loss) == {}


def test_twice_is_once(cfg: dict[str, Any]) -> None:
    stock = LlamaAttention.forward
    patch_self_attn_lora(cfg)
    ours = LlamaAttention.forward
    patch_self_attn_lora(cfg)
    assert LlamaAttention.forward is ours
    restore(LlamaAttention)
    assert LlamaAttention.forward is stock
    restore(LlamaAttention)
    restore()


@pytest.mark.parametrize(
    ("switches", "expected"),
    [
        ({"lora_qkv_kernel": True, "lora_o_kernel": False}, {"qkv": 2}),
        ({"lora_qkv_kernel": False}, {"w": 2}),
        ({"lora_qkv_kernel": True, "lora_o_kernel": True}, LLAMA),
    ],
)
def test_switches(switches: dict[str, bool], expected: dict[str, int], cfg: dict[str, Any]) -> None:
    patch_self_attn_lora({**cfg, **switches})
    assert fused(gradients(peft_model())[0]) == expected


@pytest.mark.parametrize("model_type", ["mamba", "bert", "jetmoe"])
def test_a_failed_call_leaves_nothing(model_type: str, tmp_path: Path) -> None:
    bad = configured(model_type, tmp_path)
    # Transformers notes every class of which there was ever an instance
    tiny_model(model_type)
    modules = imported()
    before = library_snapshot(modules)
    kind = ImportError if model_type == "mamba" else AssertionError
    for _ in range(2):
        with pytest.raises(kind, match="apply_lora_kernel_patches"):
            patch_self_attn_lora(bad)
    assert list(differences(before, library_snapshot(modules))) == []
    with pytest.raises(ValueError, match="base_model must be specified"):
        patch_self_attn_lora({})


def test_projections_that_cannot_be_found_are_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="BertSelfAttention makes no projection of the output") as caught:
        patch_self_attn_lora(configured("bert", tmp_path))
    assert isinstance(caught.value, PatchError)


def test_a_change_on_top_is_respected(cfg: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    patch_self_attn_lora(cfg)
    ours = LlamaAttention.forward
    monkeypatch.setattr(LlamaAttention, "forward", lambda *args, **kwargs: ours(*args, **kwargs))
    with pytest.raises(RestoreConflict, match="take that change off first"):
        restore(LlamaAttention)
    assert LlamaAttention._original_forward is ours.__wrapped__
    other = peft_model("gpt2")
    before = model_snapshot(other)
    apply_lora_kernel_patches(other, {"lora_qkv_kernel": True})
    with pytest.raises(RestoreConflict, match="LlamaAttention cannot be restored"):
        restore()
    assert list(differences(before, model_snapshot(other))) == [], "the others are restored"
    monkeypatch.undo()
    restore(LlamaAttention)


def doubled(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return 2 * output


def with_hooks(model: Any) -> None:
    for name in ("self_attn.k_proj", "self_attn.o_proj.lora_A.default"):
        layer(model).get_submodule(name).register_forward_hook(doubled)


def trained(model: Any) -> None:
    layer(model).self_attn.q_proj.base_layer.weight.requires_grad_()


def merged(model: Any) -> None:
    model.merge_adapter()
    layer(model).input_layernorm.weight.requires_grad_()


def disabled(model: Any) -> None:
    model.base_model.disable_adapter_layers()
    layer(model).input_layernorm.weight.requires_grad_()


@pytest.mark.parametrize("change", [with_hooks, trained, merged, disabled])
def test_what_is_not_plain_takes_its_own_forward(change: Any, cfg: dict[str, Any]) -> None:
    model = peft_model()
    change(model)
    want = gradients(model)
    patch_self_attn_lora(cfg)
    got = gradients(model)
    torch.testing.assert_close(got[0], want[0])
    assert got[1].keys() == want[1].keys()
    assert all(torch.allclose(g, want[1][name]) for name, g in got[1].items())


def test_dropout_is_drawn_as_peft_draws_it(cfg: dict[str, Any]) -> None:
    model = peft_model(lora_dropout=0.5)
    torch.manual_seed(3)
    want = gradients(model)
    patch_self_attn_lora(cfg)
    torch.manual_seed(3)
    got = gradients(model)
    assert torch.equal(got[0], want[0])
    assert relative_error(got[1], want[1]) < 1e-9


def test_partial_targets_and_a_second_adapter(cfg: dict[str, Any]) -> None:
    patch_self_attn_lora(cfg)
    model = peft_model(target_modules=["v_proj"])
    assert fused(gradients(model)[0]) == {"qkv": 2}
    model.add_adapter("other", LoraConfig(r=3, target_modules=LINEAR))
    model.set_adapter("other")
    assert fused(gradients(randomised(model.double()))[0]) == LLAMA


def test_layers_of_our_own(cfg: dict[str, Any]) -> None:
    model = randomised(apply_lora(double_model("llama"), ["q_proj", "v_proj", "o_proj"]))
    want = gradients(model)
    patch_self_attn_lora(cfg)
    got = gradients(model)
    assert fused(got[0]) == LLAMA
    assert relative_error(got[1], want[1]) < 1e-9


def test_beside_patches_of_the_model(cfg: dict[str, Any]) -> None:
    model, twin = pair()
    patch_self_attn_lora(cfg)
    assert_same(model, copy.deepcopy(twin), {"qkv": 2, "mlp": 2, "w": 2})
    restore(model)
    assert_same(model, copy.deepcopy(twin), LLAMA)
    apply_lora_kernel_patches(model, ALL)
    restore(LlamaAttention)
    assert_same(model, copy.deepcopy(twin), {"qkv": 2, "mlp": 2, "w": 2})
    restore(model)
    assert_same(model, twin, {})


def test_checkpointing_and_generation(cfg: dict[str, Any]) -> None:
    model = peft_model()
    ids = BATCH["input_ids"][:1, :5]
    call: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False}
    want, tokens = gradients(model), model.eval().generate(input_ids=ids, **call)
    patch_self_attn_lora(cfg)
    assert torch.equal(model.generate(input_ids=ids, **call), tokens)
    checkpointing(model.train(), use_reentrant=False)
    assert relative_error(gradients(model)[1], want[1]) < 1e-9


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_per_example_gradients(model_type: str, tmp_path: Path) -> None:
    model = peft_model(model_type)
    want = model_loop_gradients(model, **BATCH)
    patch_self_attn_lora(configured(model_type, tmp_path))
    try:
        patch(model, peft=False)
        assert fused(gradients(model)[0])
        got = per_example_grads(model, engine="vmap")(trainable(model), **BATCH)
    finally:
        restore()
    assert relative_error(got, want) < 1e-9


def test_what_a_forward_keeps_on_its_module_stays_there(cfg: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    stock = LlamaAttention.forward

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", counting)
    patch_self_attn_lora(cfg)
    model = peft_model()
    model(**BATCH)
    model(**BATCH)
    assert layer(model).self_attn.calls == 2
    restore()
