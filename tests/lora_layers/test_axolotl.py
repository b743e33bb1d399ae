"""`opake.lora.axolotl`: the contract of axolotl's kernel patches, kept on one model and undone."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import LlamaForSequenceClassification, PreTrainedConfig, PreTrainedModel

from opake.checking.tiny import tiny_config, tiny_model
from opake.errors import NotFusedWarning, OptionTypeError, RestoreConflict, UnsupportedModel
from opake.lora import apply_lora
from opake.lora.axolotl import (
    apply_lora_kernel_patches,
    get_attention_cls_from_config,
    kernel_report,
    original_apply_o,
    original_apply_qkv,
    restore,
)
from opake.patches import patch_report
from opake.patches import restore as restore_patches
from opake.testing.snapshot import differences, model_snapshot

from .peft_models import ALL, EMBEDDING, EVERYTHING, LINEAR, MLP, QKV, O, assert_same, layer, pair, peft_model
from .subjects import BATCH, double_model, fused, gradients, patch, randomised

FAMILIES = {
    "llama": EVERYTHING,
    "qwen2": EVERYTHING,
    "qwen3": EVERYTHING,
    "gemma3_text": EVERYTHING,
    "cohere": EVERYTHING,
    "olmo2": EVERYTHING,
    "phi3": {"mlp": 2, "w": 4},
    "gpt2": {"w": 8},
    "gpt_neox": {"w": 8},
    "falcon": {"w": 8},
    "opt": {"qkv": 2, "w": 6},
    "deepseek_v3": {"w": 10},
    "qwen3_5_text": {"mlp": 2, "qkv": 1, "w": 6},
}
ATTENTION_ONLY = {"deepseek_v3": r".*self_attn\.[a-z_]*proj(_with_mqa)?"}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_is_served(model_type: str) -> None:
    if model_type == "qwen3_5_text":
        pytest.importorskip("transformers.models.qwen3_5", reason="this Transformers has no Qwen3.5")
    options = {"target_modules": ATTENTION_ONLY[model_type]} if model_type in ATTENTION_ONLY else {}
    model, twin = pair(model_type, **options)
    assert_same(model, twin, FAMILIES[model_type])
    assert kernel_report(model).fallbacks == ()


SWITCHES = {
    QKV: {"qkv": 2},
    O: {"w": 2},
    MLP: {"mlp": 2},
    EMBEDDING: {},
}


@pytest.mark.parametrize("key", SWITCHES)
@pytest.mark.parametrize("form", [dict, SimpleNamespace], ids=["mapping", "attributes"])
def test_each_switch_and_both_forms_of_a_config(key: str, form: Any) -> None:
    model = peft_model(target_modules=[*LINEAR, "embed_tokens"])
    twin = copy.deepcopy(model)
    others = dict(zip((QKV, O, MLP, EMBEDDING), (None, False, None, False), strict=True))
    assert apply_lora_kernel_patches(model, form(**{**others, key: True})) is model
    assert_same(model, twin, SWITCHES[key])


@pytest.mark.parametrize("cfg", [{}, SimpleNamespace(), {QKV: False, O: None}])
def test_nothing_is_switched_on(cfg: Any) -> None:
    model = peft_model()
    before = model_snapshot(model)
    assert apply_lora_kernel_patches(model, cfg) is model
    assert list(differences(before, model_snapshot(model))) == []
    assert kernel_report(model) is None


@pytest.mark.parametrize(
    ("cfg", "message"), [({QKV: "true"}, "lora_qkv_kernel='true'"), (None, "a NoneType"), ([QKV], "a list")]
)
def test_a_wrong_config_changes_nothing(cfg: Any, message: str) -> None:
    model = peft_model()
    before = model_snapshot(model)
    with pytest.raises(OptionTypeError, match=message):
        apply_lora_kernel_patches(model, cfg)
    assert list(differences(before, model_snapshot(model))) == []


def peft_around(base: Any, **options: Any) -> Any:
    return get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], **options))


def test_only_a_peft_model_for_causal_lm() -> None:
    base = tiny_model("llama")
    wrong = [base, peft_around(copy.deepcopy(base)), "llama"]
    classifier = LlamaForSequenceClassification(tiny_config("llama", num_labels=2))
    wrong.append(peft_around(classifier, task_type="SEQ_CLS"))
    assert type(wrong[1]) is PeftModel
    for model in wrong:
        with pytest.raises(
            TypeError, match=r"Model must be a PeftModelForCausalLM, got .*apply_model_patches"
        ) as caught:
            apply_lora_kernel_patches(model, ALL)
        assert isinstance(caught.value, UnsupportedModel)
    prompt = get_peft_model(base, PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="PromptTuningConfig"):
        apply_lora_kernel_patches(prompt, ALL)


def test_one_active_adapter() -> None:
    model = peft_model()
    model.add_adapter("other", LoraConfig(r=3, target_modules=LINEAR))
    model.base_model.set_adapter(["default", "other"])
    before = model_snapshot(model)
    with pytest.raises(AssertionError, match=r"2 are active: default, other.*set_adapter"):
        apply_lora_kernel_patches(model, ALL)
    assert list(differences(before, model_snapshot(model))) == []


class NoLayersConfig(PreTrainedConfig):
    model_type = "no_layers"


class NoLayersForCausalLM(PreTrainedModel):
    config_class = NoLayersConfig

    def __init__(self, config: NoLayersConfig) -> None:
        super().__init__(config)
        self.q_proj = nn.Linear(4, 4)

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.q_proj(input_ids)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return {}


def test_a_model_without_layers_is_not_supported() -> None:
    model = peft_around(NoLayersForCausalLM(NoLayersConfig()), task_type="CAUSAL_LM")
    before = model_snapshot(model)
    with pytest.raises(NotImplementedError, match=r"Model type no_layers is not supported.*apply_model_patches"):
        apply_lora_kernel_patches(model, ALL)
    assert list(differences(before, model_snapshot(model))) == []


def test_a_layer_without_any_adapter_of_its_kind_is_warned_of() -> None:
    model = peft_model(target_modules=["q_proj", "v_proj"])
    with pytest.warns(NotFusedWarning) as caught:
        apply_lora_kernel_patches(model, ALL)
    assert sorted(str(w.message).partition(":")[0] for w in caught) == [MLP, O]
    assert {w.filename for w in caught} == {__file__}, "the warning points at the caller"
    assert fused(gradients(model)[0]) == {"qkv": 2}


def test_partial_targets_are_folded_in() -> None:
    model, twin = pair(cfg={QKV: True, MLP: True}, target_modules=["k_proj", "up_proj"])
    assert_same(model, twin, {"qkv": 2, "mlp": 2})


def test_restore_is_identical_and_leaves_other_patches() -> None:
    model = peft_model("qwen2")
    before = model_snapshot(model)
    apply_lora_kernel_patches(model, ALL)
    gradients(model)
    assert list(differences(before, model_snapshot(model)))
    restore(model)
    assert list(differences(before, model_snapshot(model))) == []
    restore(model)
    assert kernel_report(model) is None
    patch(model, peft=False)
    patched = model_snapshot(model)
    apply_lora_kernel_patches(model, ALL)
    assert fused(gradients(model)[0]) == EVERYTHING
    restore(model)
    changed = [line for line in differences(patched, model_snapshot(model)) if "_opake" not in line]
    assert changed == []
    assert not patch_report(model).find(source="opake.lora.axolotl")
    restore_patches(model)
    assert list(differences(before, model_snapshot(model))) == []


def test_the_general_restore_takes_these_patches_back_too() -> None:
    model = peft_model()
    before = model_snapshot(model)
    apply_lora_kernel_patches(model, ALL)
    restore_patches(model)
    assert list(differences(before, model_snapshot(model))) == []
    restore(model)


def test_restore_without_a_target_finds_every_model_and_copy() -> None:
    first, second, untouched = peft_model(), peft_model("gpt2"), peft_model()
    before = [model_snapshot(each) for each in (first, second, untouched)]
    for model in (first, second):
        apply_lora_kernel_patches(model, ALL)
    twin = copy.deepcopy(first)
    assert fused(gradients(twin)[0]) == EVERYTHING
    restore()
    for model, snapshot in zip((first, second, untouched), before, strict=True):
        assert list(differences(snapshot, model_snapshot(model))) == []
    assert fused(gradients(twin)[0]) == {}
    restore()
    with pytest.raises(TypeError, match="restore takes a model"):
        restore("llama")  # type: ignore[arg-type]


def test_a_foreign_wrapper_is_respected() -> None:
    model = peft_model()
    apply_lora_kernel_patches(model, ALL)
    ours = layer(model).self_attn.forward
    layer(model).self_attn.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    snapshot = model_snapshot(model)
    with pytest.raises(RestoreConflict, match=r"(?i)take that change off first"):
        restore(model)
    assert list(differences(snapshot, model_snapshot(model))) == []
    layer(model).self_attn.forward = ours
    restore(model)


def test_patches_that_lie_on_top_are_named_with_the_way_out() -> None:
    model = peft_model()
    before = model_snapshot(model)
    apply_lora_kernel_patches(model, ALL)
    patch(model, rope=True, activation=True)
    with pytest.raises(RestoreConflict, match=r"opake\.patches\.restore\(model\) takes everything back"):
        restore(model)
    restore_patches(model)
    assert list(differences(before, model_snapshot(model))) == []


def test_other_models_are_untouched_and_dead_models_are_let_go() -> None:
    model, other = peft_model(), peft_model()
    before = model_snapshot(other)
    apply_lora_kernel_patches(model, ALL)
    assert list(differences(before, model_snapshot(other))) == []
    assert fused(gradients(other)[0]) == {}
    gone = weakref.ref(model.base_model.model)
    del model
    gc.collect()
    assert gone() is None


def composite() -> Any:
    """A tiny Llava in float64, with LoRA on both towers."""
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**sizes, image_size=8, patch_size=4)
    config = LlavaConfig(vision_config=vision, text_config=tiny_config("llama"), image_token_index=96)
    base = LlavaForConditionalGeneration(config).double()
    options = {"target_modules": r".*(q|k|v|o|out|gate|up|down)_proj", "task_type": "CAUSAL_LM"}
    return randomised(get_peft_model(base, LoraConfig(r=2, **options)).double())


def test_of_a_composite_model_the_text_part_is_patched() -> None:
    model = composite()
    twin = copy.deepcopy(model)
    apply_lora_kernel_patches(model, ALL)
    sites = {row.site for row in kernel_report(model).find(state="applied")}
    assert sites
    assert all("vision" not in site for site in sites)
    assert_same(model, twin, EVERYTHING)


def test_twice_and_more_switches() -> None:
    model = peft_model()
    apply_lora_kernel_patches(model, {QKV: True})
    apply_lora_kernel_patches(model, {QKV: True})
    assert fused(gradients(model)[0]) == {"qkv": 2}
    apply_lora_kernel_patches(model, ALL)
    assert fused(gradients(model)[0]) == EVERYTHING
    report = kernel_report(model)
    assert {row.hook for row in report.rows} == {QKV, O, MLP}
    assert {row.state for row in report.rows if row.hook == QKV} == {"already"}
    assert "KernelMLP" in str(report)
    assert type(report).from_json(report.to_json()) == report


def test_states_of_peft_are_looked_at_in_every_forward() -> None:
    model, twin = pair()
    for change in ("disable_adapter_layers", "enable_adapter_layers", "merge_adapter", "unmerge_adapter"):
        for each in (model, twin):
            getattr(each.base_model, change)()
        with torch.no_grad():
            torch.testing.assert_close(model(**BATCH).logits, twin(**BATCH).logits)
    with model.disable_adapter(), torch.no_grad():
        assert torch.equal(model(**BATCH).logits, twin.unload()(**BATCH).logits)
    assert {f.reason for f in kernel_report(model).fallbacks} >= {"q_proj: adapters are disabled"}


def test_a_failed_call_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from opake.lora import mlp

    def fail(*args: Any) -> Any:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(mlp, "apply", fail)
    model = peft_model()
    before = model_snapshot(model)
    with pytest.raises(RuntimeError, match="on purpose"):
        apply_lora_kernel_patches(model, ALL)
    assert list(differences(before, model_snapshot(model))) == []
    assert kernel_report(model) is None


def test_reduced_precision_and_autocast() -> None:
    model = peft_model().bfloat16()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    apply_lora_kernel_patches(model, ALL)
    loss, got = gradients(model)
    assert fused(loss) == EVERYTHING
    assert {g.dtype for g in got.values()} == {torch.float32}
    model = peft_model().float()
    apply_lora_kernel_patches(model, ALL)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**BATCH).loss
    assert fused(loss) == EVERYTHING
    loss.backward()


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "phi3", "qwen2"])
def test_original_projections(model_type: str) -> None:
    model = double_model(model_type)
    attention = next(m for m in model.modules() if type(m).__name__.endswith("Attention"))
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    query, key, value = original_apply_qkv(attention, x)
    combined = next((attention.get_submodule(n) for n in ("c_attn", "qkv_proj") if hasattr(attention, n)), None)
    if combined is None:
        assert torch.equal(query, attention.q_proj(x))
        assert torch.equal(value, attention.v_proj(x))
    else:
        assert torch.equal(torch.cat([query, key, value], -1), combined(x))
    assert key.shape == value.shape
    out = getattr(attention, "o_proj", None) or attention.c_proj
    assert torch.equal(original_apply_o(attention, x), out(x))
    adapted = apply_lora(copy.deepcopy(model), "all-linear")
    attention = next(m for m in adapted.modules() if type(m).__name__.endswith("Attention"))
    torch.testing.assert_close(original_apply_qkv(attention, x), (query, key, value))


def test_original_projections_where_value_is_key_or_nothing_is_known() -> None:
    attention: Any = nn.Module()
    attention.q_proj, attention.k_proj, attention.v_proj = nn.Linear(4, 4), nn.Linear(4, 2), None
    query, key, value = original_apply_qkv(attention, torch.randn(2, 4))
    assert value is key
    assert query.shape == (2, 4)
    for function in (original_apply_qkv, original_apply_o):
        with pytest.raises(AssertionError, match=r"has no .* but"):
            function(nn.Sequential(nn.ReLU()), torch.randn(2, 4))


def test_bound_methods_are_fused_and_taken_back() -> None:
    model, twin = pair()
    attention, stock = layer(model).self_attn, layer(twin).self_attn
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    found = attention.apply_qkv(x)
    torch.testing.assert_close(found, original_apply_qkv(stock, x))
    assert fused(sum(each.sum() for each in found)) == {"qkv": 1}
    torch.testing.assert_close(attention.apply_o(x), stock.o_proj(x))
    restore(model)
    assert not hasattr(attention, "apply_qkv")


CLASSES = {
    "llama": "LlamaAttention",
    "gpt2": "GPT2Attention",
    "phi3": "Phi3Attention",
    "gemma3_text": "Gemma3Attention",
    "llama4_text": "Llama4TextAttention",
    "deepseek_v3": "DeepseekV3Attention",
    "cohere": "CohereAttention",
    "gpt_neo": "GPTNeoSelfAttention",
}


@pytest.mark.parametrize("model_type", CLASSES)
def test_the_attention_class(model_type: str, tmp_path: Path) -> None:
    tiny_config(model_type).save_pretrained(tmp_path)
    for cfg in ({"base_model": str(tmp_path)}, SimpleNamespace(base_model=tmp_path)):
        found = get_attention_cls_from_config(cfg)
        assert found.__name__ == CLASSES[model_type]
        assert any(type(module) is found for module in tiny_model(model_type).modules())


def test_the_attention_class_of_a_composite_model(tmp_path: Path) -> None:
    from transformers import LlavaConfig

    LlavaConfig(text_config=tiny_config("qwen2")).save_pretrained(tmp_path)
    assert get_attention_cls_from_config({"base_model": str(tmp_path)}).__name__ == "Qwen2Attention"


def test_no_attention_class(tmp_path: Path) -> None:
    for cfg in ({}, {"base_model": None}, SimpleNamespace()):
        with pytest.raises(ValueError, match="base_model must be specified in config"):
            get_attention_cls_from_config(cfg)
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    for error in (ValueError, ImportError):
        with pytest.raises(error, match=r"(?s)no_such_model.*apply_lora_kernel_patches"):
            get_attention_cls_from_config({"base_model": str(tmp_path)})
    tiny_config("mamba").save_pretrained(tmp_path)
    with pytest.raises(ImportError, match="MambaForCausalLM has no attention with projections"):
        get_attention_cls_from_config({"base_model": str(tmp_path)})
    with pytest.raises(ValueError, match=r"(?s)no_such_folder.*its config cannot be read.*apply_lora_kernel_patches"):
        get_attention_cls_from_config({"base_model": str(tmp_path / "no_such_folder")})
