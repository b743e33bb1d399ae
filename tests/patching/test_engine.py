"""Apply, report, restore: one model changes, nothing else does, and everything comes back."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from typing import Any, ClassVar

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.func import functional_call, grad, vmap
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM

from opake.errors import (
    GenericFamilyWarning,
    OptionTypeError,
    PatchError,
    RestoreConflict,
    UnknownFamily,
    UnknownOption,
    UnsupportedModel,
)
from opake.functional import per_example_grads
from opake.patches import PatchReport, apply_model_patches, patch_report, patched, restore

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
KERNELS = {"rope": True, "rms_norm": True, "activation": True, "cross_entropy": True}
IDS = torch.arange(18).reshape(3, 6)


def llama(config: LlamaConfig | None = None) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(config or LlamaConfig(**SIZES))


def state(model: nn.Module) -> dict[str, dict[str, object]]:
    """Every attribute of every submodule, dictionaries by their items, so that identity can be compared."""
    found = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            found[f"{name}.{key}"] = dict(value) if isinstance(value, dict) else value
    return found


def same(before: dict, after: dict) -> list[str]:
    """Names that are not the very same objects."""

    def differs(a: object, b: object) -> bool:
        if isinstance(a, dict) and isinstance(b, dict):
            return a.keys() != b.keys() or any(a[k] is not b[k] for k in a)
        return a is not b and a != b

    return sorted(
        set(before.keys() ^ after.keys()) | {k for k in before.keys() & after.keys() if differs(before[k], after[k])}
    )


def foreign(table: dict) -> dict:
    """The entries of a public table that are not ours."""
    return {name: function for name, function in table.items() if not name.startswith("opake")}


def per_example(model: nn.Module, ids: torch.Tensor = IDS) -> dict[str, torch.Tensor]:
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def loss(p: dict, row: torch.Tensor) -> torch.Tensor:
        return functional_call(model, p, (), {"input_ids": row, "labels": row}).loss

    return vmap(grad(loss), (None, 0))(params, ids)


@pytest.mark.parametrize("options", [{}, KERNELS, {"dropout": False}], ids=["plain", "kernels", "dropout"])
def test_restore_is_identical(options: dict[str, bool]) -> None:
    config = LlamaConfig(**SIZES, attention_dropout=0.1)
    model = llama(config)
    before, table, masks = (
        state(model),
        dict(AttentionInterface._global_mapping),
        dict(AttentionMaskInterface._global_mapping),
    )
    apply_model_patches(model, **options)
    assert same(before, state(model)), "nothing was patched"
    restore(model)
    assert same(before, state(model)) == []
    assert model.config is config
    # other tests may hold patched models of their own
    assert foreign(AttentionInterface._global_mapping) == foreign(table)
    assert foreign(AttentionMaskInterface._global_mapping) == foreign(masks)
    assert patch_report(model) is None


def test_second_model_from_the_same_config_is_untouched() -> None:
    config = LlamaConfig(**SIZES)
    one, two = llama(config), llama(config)
    before, expected = state(two), two(IDS).logits
    apply_model_patches(one)
    assert same(before, state(two)) == []
    assert config._attn_implementation == "sdpa"
    assert torch.equal(two(IDS).logits, expected)
    with pytest.raises(RuntimeError, match="size of tensor"):
        two(IDS[0])
    assert one(IDS[0]).logits.shape == (6, 64)


def test_changes_of_the_config_while_patched_are_kept() -> None:
    config = LlamaConfig(**SIZES)
    model = llama(config)
    apply_model_patches(model)
    model.config.pad_token_id = 7
    model.config.rope_parameters["rope_theta"] = 99.0
    restore(model)
    assert model.config is config
    assert config.pad_token_id == 7
    assert config.rope_parameters["rope_theta"] == 99.0
    assert config._attn_implementation == "sdpa"


def test_twice_is_once() -> None:
    model = llama()
    first = apply_model_patches(model)
    snapshot = state(model)
    second = apply_model_patches(model)
    assert {row.site for row in first.find(state="applied")} == {row.site for row in second.find(state="already")}
    changed = [name for name in same(snapshot, state(model)) if not name.endswith("._opake")]
    assert changed == []
    restore(model)
    assert patch_report(model) is None


def test_a_second_call_may_add_a_patch() -> None:
    model = llama()
    apply_model_patches(model)
    report = apply_model_patches(model, rms_norm=True)
    assert {row.record for row in report.find(state="applied")} == {
        "RMSNorm(LlamaRMSNorm)",
        "AddRMSNorm(LlamaDecoderLayer)",
    }
    restore(model)


def test_context_manager_leaves_what_was_there() -> None:
    model = llama()
    with patched(model) as report:
        assert report.find(state="applied")
        assert model(IDS[0]).logits.shape == (6, 64)
        with patched(model, rope=True) as inner:
            assert inner.find(flag="rope", state="applied")
            assert inner.find(flag="batchify", state="already")
        assert model(IDS[0]).logits.shape == (6, 64)
    assert patch_report(model) is None
    with pytest.raises(ValueError, match="on purpose"), patched(model):
        raise ValueError("on purpose")
    assert patch_report(model) is None


def test_deep_copy_has_patches_of_its_own() -> None:
    model = llama()
    apply_model_patches(model, **KERNELS)
    twin = copy.deepcopy(model)
    expected = per_example(model)
    restore(model)
    with pytest.raises(RuntimeError, match="size of tensor"):
        model(IDS[0])
    for name, gradient in per_example(twin).items():
        assert torch.equal(gradient, expected[name])
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    assert twin(IDS[0]).logits.abs().max() == 0
    assert model(IDS).logits.abs().max() > 0
    assert apply_model_patches(twin, **KERNELS).find(state="applied") == ()
    restore(twin)
    assert "forward" not in vars(twin)


def test_wrapper_put_on_later_is_respected() -> None:
    model = llama()
    apply_model_patches(model)
    ours = model.forward
    model.forward = lambda *a, **k: ours(*a, **k)
    foreign = model.forward
    with pytest.raises(RestoreConflict, match=r"forward is .*lambda"):
        restore(model)
    assert model.forward is foreign
    assert model(IDS[0]).logits.shape == (6, 64)
    vars(model)["forward"] = ours
    restore(model)
    assert "forward" not in vars(model)


def test_forward_installed_before_is_wrapped_and_comes_back() -> None:
    model = llama()
    stock, calls = model.forward, []

    def counted(*args: object, **kwargs: object) -> object:
        calls.append(1)
        return stock(*args, **kwargs)

    model.forward = counted
    apply_model_patches(model)
    assert model(input_ids=IDS[0]).logits.shape == (6, 64)
    assert calls == [1]
    restore(model)
    assert model.forward is counted


def test_failure_half_way_takes_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    before = state(model)
    monkeypatch.setattr("opake.batching.cache.apply", lambda module: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        apply_model_patches(model)
    assert same(before, state(model)) == []


def test_peft_model_takes_rows_and_restores() -> None:
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM"))
    before = state(model)
    report = apply_model_patches(model)
    assert report.find(site="PeftModelForCausalLM", flag="batchify", state="applied")
    assert model(input_ids=IDS[0], labels=IDS[0]).logits.shape == (6, 64)
    gradients = per_example(model)
    assert len(gradients) == 8
    assert patch_report(model) == patch_report(model.get_base_model())
    restore(model)
    assert same(before, state(model)) == []


def test_adapters_attached_after_patching_are_seen() -> None:
    base = llama()
    apply_model_patches(base)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    report = apply_model_patches(model)
    assert report.find(site="PeftModelForCausalLM", state="applied")
    assert per_example(model).keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    restore(model)


def test_report_says_all_and_round_trips() -> None:
    model = llama()
    report = apply_model_patches(model, kernels=False, vmap_checkpointing=False, empty_batches=True)
    assert PatchReport.from_json(report.to_json()) == report
    assert {row.reason for row in report.find(flag="rope")} == {"kernels=False"}
    assert report.find(flag="vmap_checkpointing")[0].reason == "vmap_checkpointing=False"
    assert "not in this scope" in report.find(flag="empty_batches")[0].reason
    assert report.find(record="RMSNorm(LlamaRMSNorm)")[0].source.startswith("opake_families/llama.py:")
    for word in ("LlamaForCausalLM", "family: llama", "FoldedAttention", "kernels=False"):
        assert word in str(report)
    with pytest.raises(ValueError, match="unknown keys"):
        PatchReport.from_json('{"other": 1}')


def test_run_time_fall_backs_are_counted() -> None:
    model = llama(LlamaConfig(**SIZES, attention_dropout=0.5)).train()
    apply_model_patches(model)
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(p: dict, row: torch.Tensor) -> torch.Tensor:
        return functional_call(model, p, (), {"input_ids": row, "labels": row}).loss

    vmap(grad(loss), (None, 0), randomness="different")(params, IDS)
    report = patch_report(model)
    assert report is not None
    assert [(f.site, f.count) for f in report.fallbacks] == [(f"model.layers.{i}.self_attn", 1) for i in range(2)]
    assert "attention dropout" in report.fallbacks[0].reason
    assert "fell back while running" in str(report)
    restore(model)
    assert not any("_opake_notes" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"ropee": True}, UnknownOption, "did you mean rope"),
        ({"kernel": True}, UnknownOption, "did you mean kernels"),
        ({"rope": "yes"}, OptionTypeError, "rope='yes' is a str"),
        ({"rope": 1}, OptionTypeError, "rope=1 is a int"),
        ({"compat": None}, OptionTypeError, "compat=None"),
        ({"dropout": True}, OptionTypeError, "dropout=True has no meaning"),
        ({"chunked_linear_cross_entropy": 0}, OptionTypeError, "positive tile width"),
    ],
)
def test_bad_options_change_nothing(options: dict, error: type[Exception], text: str) -> None:
    model = llama()
    before = state(model)
    with pytest.raises(error, match=text) as raised:
        apply_model_patches(model, **options)
    assert isinstance(raised.value, TypeError)
    assert same(before, state(model)) == []


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="got str"):
        apply_model_patches("llama")
    with pytest.raises(UnsupportedModel, match="compat=False"):
        apply_model_patches(nn.Linear(2, 2))
    report = apply_model_patches(nn.Linear(2, 2), compat=False)
    assert report.rows[0].state == "skipped"
    with torch.device("meta"):
        empty = LlamaForCausalLM(LlamaConfig(**SIZES))
    with pytest.raises(UnsupportedModel, match=r"embed_tokens.weight is on the meta device.*load the weights"):
        apply_model_patches(empty)


def test_unregistered_model_type_is_patched_generically() -> None:
    model = llama()
    model.config.model_type = "lama"
    with pytest.raises(UnknownFamily, match="did you mean llama"):
        apply_model_patches(model, strict=True)
    with pytest.warns(GenericFamilyWarning, match="generically"):
        report = apply_model_patches(model)
    assert report.family == "generic"
    assert len(per_example(model)) == len(list(model.parameters()))
    restore(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_model_patches(model)


def test_eager_attention_is_left_to_the_model() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="eager"))
    report = apply_model_patches(model)
    assert report.find(flag="eager_attention")[0].state == "stock"
    assert model.config._attn_implementation == "eager"
    assert model(IDS, output_attentions=True).attentions[0].shape == (3, 4, 6, 6)


def test_flex_attention_is_replaced_and_the_report_says_so() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="flex_attention"))
    plain = llama()
    plain.load_state_dict(model.state_dict())
    report = apply_model_patches(model)
    assert (
        report.find(flag="eager_attention")[0].reason
        == "inside transforms by cpu_flash, public, in place of flex_attention"
    )
    apply_model_patches(plain)
    expected = per_example(plain)
    assert all(torch.equal(g, expected[name]) for name, g in per_example(model).items())
    restore(model)
    assert model.config._attn_implementation == "flex_attention"


@pytest.mark.parametrize(("off", "name"), [("eager_attention", "opake_masking"), ("vmap_masking", "opake_attention")])
def test_attention_and_masks_switch_apart(off: str, name: str) -> None:
    model = llama()
    expected = model(IDS, attention_mask=torch.ones_like(IDS)).logits
    report = apply_model_patches(model, **{off: False})
    assert report.find(flag=off)[0].state == "off"
    assert model.config._attn_implementation == name
    assert torch.allclose(model(IDS, attention_mask=torch.ones_like(IDS)).logits, expected, atol=1e-6)
    apply_model_patches(model)
    assert model.config._attn_implementation == "opake"
    restore(model)
    assert model.config._attn_implementation == "sdpa"


def test_training_forward_allocates_no_cache() -> None:
    model = llama().train()
    key = "cache" if "cache" in model(IDS) else "past_key_values"
    apply_model_patches(model)
    assert model(IDS).get(key) is None
    assert model(IDS, use_cache=True).get(key) is not None
    with torch.no_grad():
        assert model(IDS).get(key) is not None
    restore(model)
    assert model(IDS).get(key) is not None


def test_dropout_false_silences_dropout_until_restore() -> None:
    model = llama(LlamaConfig(**SIZES, attention_dropout=0.5)).train()
    assert not torch.equal(model(IDS).logits, model(IDS).logits)
    apply_model_patches(model, dropout=False)
    assert torch.equal(model(IDS).logits, model(IDS).logits)
    restore(model)
    assert model.model.layers[0].self_attn.attention_dropout == 0.5
    assert not torch.equal(model(IDS).logits, model(IDS).logits)


@pytest.mark.filterwarnings("ignore::opake.errors.GenericFamilyWarning")
def test_dropout_that_a_forward_reads_from_its_config_is_silenced_too() -> None:
    from transformers import FalconConfig, FalconForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = FalconConfig(**sizes, bos_token_id=1, eos_token_id=2, hidden_dropout=0.3, attention_dropout=0.3)
    model, other = FalconForCausalLM(config).train(), FalconForCausalLM(config).train()
    apply_model_patches(model, dropout=False)
    assert torch.equal(model(IDS).logits, model(IDS).logits)
    assert not torch.equal(other(IDS).logits, other(IDS).logits)
    model.config.bos_token_id = 3
    restore(model)
    assert model.config is config
    assert (config.hidden_dropout, config.attention_dropout, config.bos_token_id) == (0.3, 0.3, 3)
    assert not torch.equal(model(IDS).logits, model(IDS).logits)


def test_dropout_of_a_model_with_numbers_of_its_own_leaves_the_config_alone() -> None:
    model = llama(LlamaConfig(**SIZES, attention_dropout=0.5)).train()
    apply_model_patches(model, dropout=False)
    assert model.config.attention_dropout == 0.5


class TestAnotherAttentionAfterPatching:
    """`set_attn_implementation` on a patched model: told, mended by patching again, and kept by restore."""

    rows: ClassVar = {"input_ids": IDS, "labels": IDS, "attention_mask": torch.ones_like(IDS)}

    def grads(self, model: Any) -> Any:
        params = {name: p.detach() for name, p in model.named_parameters()}
        return per_example_grads(model, engine="vmap")(params, **self.rows)

    @pytest.mark.parametrize("name", ["sdpa", "flex_attention"])
    def test_it_is_told_and_mended(self, name: str) -> None:
        model = llama()
        apply_model_patches(model)
        want = self.grads(model)
        model.set_attn_implementation("eager")
        model.set_attn_implementation(name)
        with pytest.raises(PatchError, match=f"changed to '{name}' after it was patched; call .*apply_model_patches"):
            self.grads(model)
        report = apply_model_patches(model)
        assert [row.state for row in report.rows if row.flag == "eager_attention"] == ["applied"]
        got = self.grads(model)
        assert all(torch.allclose(got[key], want[key], atol=1e-6) for key in want)
        assert [row.state for row in apply_model_patches(model).find(flag="eager_attention")] == ["already"]
        restore(model)
        assert model.config._attn_implementation == name

    def test_eager_goes_on_and_stays_after_restore(self) -> None:
        model = llama()
        apply_model_patches(model)
        want = self.grads(model)
        model.set_attn_implementation("eager")
        got = self.grads(model)
        assert all(torch.allclose(got[key], want[key], atol=1e-6) for key in want)
        restore(model)
        assert model.config._attn_implementation == "eager"


def test_pickling_a_patched_model_says_what_to_do(tmp_path) -> None:
    model = llama()
    torch.save(model, tmp_path / "stock.pt")
    apply_model_patches(model)
    with pytest.raises(TypeError, match=r"state_dict.*restore"):
        torch.save(model, tmp_path / "patched.pt")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    model.save_pretrained(tmp_path / "saved")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.config._attn_implementation == "sdpa"
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_our_names_leave_the_public_tables_with_the_last_model() -> None:
    code = """
import copy
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from opake.patches import apply_model_patches, restore
sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
tables = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
before = [dict(table) for table in tables]
model = LlamaForCausalLM(LlamaConfig(**sizes))
apply_model_patches(model)
twin = copy.deepcopy(model)
lost = copy.deepcopy(model)
del lost
assert "opake" in tables[0] and "opake" in tables[1]
restore(model)
assert "opake" in tables[0], "the deep copy still needs it"
restore(twin)
assert [dict(table) for table in tables] == before
"""
    subprocess.run([sys.executable, "-c", code], check=True)
