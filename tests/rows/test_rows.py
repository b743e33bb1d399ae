"""The row kernels in place: each variant is recognised by its numbers, installed on the instance, and undone."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import opake_kernels.add_rms_norm
from opake.errors import OpakeError
from opake.functional import per_example_grads
from opake.patches import apply_model_patches, patch_report, restore
from opake.records import GatedMLP, RMSNorm
from opake.rows import add_rms_norm, gated_mlp, lazy_sum, rms_norm, rotary

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EVERY = {"rope": True, "rms_norm": True, "activation": True, "cross_entropy": True}


def llama(**options: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def modeling(name: str):
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


@pytest.mark.parametrize(
    ("name", "cls", "offset", "cast"),
    [
        ("llama", "LlamaRMSNorm", 0.0, "before"),
        ("exaone4", "Exaone4RMSNorm", 0.0, "before"),
        ("olmo2", "Olmo2RMSNorm", 0.0, "after"),
        ("gpt_oss", "GptOssRMSNorm", 0.0, "after"),
        ("gemma", "GemmaRMSNorm", 1.0, "after"),
        ("gemma3", "Gemma3RMSNorm", 1.0, "after"),
        ("qwen3_next", "Qwen3NextRMSNorm", 1.0, "after"),
    ],
)
def test_norm_variant_is_found(name: str, cls: str, offset: float, cast: str) -> None:
    variant = rms_norm.variant_of(getattr(modeling(name), cls)(16))
    assert variant is not None
    assert (variant.offset, variant.cast) == (offset, cast)


@pytest.mark.parametrize(("name", "cls"), [("cohere", "CohereLayerNorm"), ("qwen3_next", "Qwen3NextRMSNormGated")])
def test_other_norms_are_left_alone(name: str, cls: str) -> None:
    skip = rms_norm.fits(RMSNorm(None), getattr(modeling(name), cls)(16))
    assert skip is not None
    assert cls in skip.reason


@pytest.mark.parametrize(
    ("name", "interleaved", "tables"),
    [
        ("llama", False, "halves"),
        ("phi3", False, "halves"),
        ("olmo2", False, "halves"),
        ("cohere", True, "pairs"),
        ("cohere2", True, "pairs"),
        ("glm4", True, "halves"),
        ("gpt_oss", False, "once"),
    ],
)
def test_rope_layout_is_found(name: str, interleaved: bool, tables: str) -> None:
    assert rotary.layout_of(modeling(name)) == (interleaved, tables)


def test_partial_rope_equals_stock() -> None:
    for name in ("phi3", "glm4"):
        module = modeling(name)
        q, k, angles = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 3, 16), torch.randn(2, 3, 4)
        tables = [f(torch.cat([angles, angles], -1)) for f in (torch.cos, torch.sin)]
        layout = rotary.layout_of(module)
        assert layout is not None
        ours, stock = rotary.rotate(layout, q, k, *tables), module.apply_rotary_pos_emb(q, k, *tables)
        torch.testing.assert_close(ours, stock)


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh", "relu", "quick_gelu"])
def test_activation_follows_the_config(act: str) -> None:
    model = llama(hidden_act=act)
    ids = torch.arange(12).reshape(2, 6)
    expected = model(ids).logits
    report = apply_model_patches(model, **EVERY)
    assert len(report.find(flag="activation", state="applied")) == 2
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)


def test_unknown_activation_stays_with_the_model() -> None:
    report = apply_model_patches(llama(hidden_act="mish"), **EVERY)
    rows = report.find(flag="activation")
    assert {row.state for row in rows} == {"stock"}
    assert "no fused kernel" in rows[0].reason


def test_mlp_that_computes_something_else_is_refused() -> None:
    class Reversed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)
            self.act_fn = nn.SiLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))

    skip = gated_mlp.fits(GatedMLP(Reversed), Reversed())
    assert skip is not None
    assert "something else" in skip.reason


def test_residual_sum_ends_in_the_fused_op(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = llama(), []
    real = opake_kernels.add_rms_norm.opake_fused_add_rms_norm
    monkeypatch.setattr(rms_norm, "opake_fused_add_rms_norm", lambda *a, **k: calls.append(1) or real(*a, **k))
    ids = torch.arange(12).reshape(2, 6)
    expected = model(ids, output_hidden_states=True, labels=ids)
    apply_model_patches(model, **EVERY)
    found = model(ids, output_hidden_states=True, labels=ids)
    assert len(calls) == 2
    assert all(isinstance(h, torch.Tensor) for h in found.hidden_states)
    torch.testing.assert_close(found.hidden_states, expected.hidden_states, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.loss, expected.loss)


def test_pending_sum_is_an_ordinary_tensor_to_everything_else() -> None:
    residual, addend = torch.randn(2, 3), torch.randn(2, 3)
    pending = lazy_sum.Pending(addend)
    assert isinstance(residual + pending, lazy_sum.Sum)
    assert torch.equal(torch.relu(residual + pending), torch.relu(residual + addend))
    assert torch.equal((residual + pending * 2.0) + residual, residual + addend * 2.0 + residual)
    assert torch.equal(residual + (residual + pending), residual + (residual + addend))
    assert (residual + pending).shape == (2, 3)
    assert torch.equal((residual + pending)[0], (residual + addend)[0])
    assert torch.equal(residual.double() + pending, residual.double() + addend)


def test_add_norm_needs_its_submodules() -> None:
    from opake.records import AddRMSNorm

    layer = llama().model.layers[0]
    skip = add_rms_norm.fits(AddRMSNorm(type(layer), norm="no_such_norm"), layer)
    assert skip is not None
    assert "no_such_norm" in skip.reason


@pytest.mark.parametrize("flags", [EVERY, {}], ids=["kernels", "none"])
def test_loss_keywords_outside_transforms(flags: dict[str, bool]) -> None:
    model = llama()
    ids = torch.randint(0, 64, (2, 6))
    stock = [model(ids, labels=ids, num_items_in_batch=n).loss for n in (None, 7, torch.tensor(7))]
    shifted = model(ids, labels=None, shift_labels=ids, num_items_in_batch=None)
    assert shifted.loss is None, "the model computes no loss without labels"
    apply_model_patches(model, **flags)
    for expected, n in zip(stock, (None, 7, torch.tensor(7)), strict=True):
        torch.testing.assert_close(model(ids, labels=ids, num_items_in_batch=n).loss, expected)
    logits = model(ids).logits.float()
    smooth = torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, 64), ids[:, 1:].reshape(-1), label_smoothing=0.1
    )
    for loss_only in (False, True):
        call = {"labels": ids, "label_smoothing": 0.1, "loss_only": loss_only}
        torch.testing.assert_close(model(ids, **call).loss, smooth)
        torch.testing.assert_close(model(ids, **call, num_items_in_batch=7).loss, smooth * 10 / 7)
        one = torch.func.vmap(lambda row, call=call: model(row, **{**call, "labels": row}).loss)
        torch.testing.assert_close(one(ids).mean(), smooth)
    torch.testing.assert_close(
        model(ids, labels=ids, shift_labels=ids).loss,
        torch.nn.functional.cross_entropy(logits.reshape(-1, 64), ids.reshape(-1)),
    )
    if flags:
        # stock, which runs without the kernel, answers NaN
        assert model(ids, labels=torch.full_like(ids, -100)).loss == 0


def test_a_loss_keyword_reaches_per_example_gradients() -> None:
    model = llama().requires_grad_(False)
    apply_model_patches(model, **EVERY)
    params = {name: p.requires_grad_() for name, p in model.named_parameters() if "layernorm" in name}
    ids = torch.randint(0, 64, (2, 6))
    rows = {"input_ids": ids, "labels": ids, "label_smoothing": 0.5}
    with pytest.raises(OpakeError, match="per-row losses need labels and nothing else about the loss"):
        per_example_grads(model, engine="batched")(params, **rows)
    got = per_example_grads(model)(params, **rows)
    for i in range(2):
        loss = model(ids[i : i + 1], labels=ids[i : i + 1], label_smoothing=0.5).loss
        want = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
        torch.testing.assert_close({name: g[i] for name, g in got.items()}, want)


def test_kernels_are_off_without_a_gpu_unless_asked_for() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    report = apply_model_patches(llama())
    assert {row.state for row in report.find(flag="rope")} == {"off"}
    assert report.find(flag="rope")[0].reason == "no CUDA device"
    report = apply_model_patches(llama(), rope=True)
    assert {row.state for row in report.find(flag="rope")} == {"applied"}


def test_gpt2_takes_the_loss_only() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2))
    apply_model_patches(model, **EVERY)
    report = patch_report(model)
    assert report is not None
    assert {row.flag for row in report.find(hook="opake_kernel_patches", state="applied")} >= {"cross_entropy"}
    restore(model)
    assert patch_report(model) is None
