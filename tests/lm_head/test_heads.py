"""Heads that are not one plain linear: the same loss and gradients, fused where that is right, else with a reason."""

from __future__ import annotations

import copy
from types import MethodType

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrize

from opake.checking.tiny import tiny_batch, tiny_model
from opake.functional import per_example_grads
from opake.lm_head import supports_loss_only
from opake.patches import apply_model_patches, patch_report, restore
from opake.testing.oracle import model_loop_gradients, relative_error

BATCH = tiny_batch()
CLOSE = 1e-5
PREFIX = "loss_only: logits were computed, "


def _with_peft(tied=False, **options):
    settings = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **options}
    model = get_peft_model(tiny_model("llama", tie_word_embeddings=tied), LoraConfig(**settings), adapter_name="x")
    torch.manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p) * 0.2)
    return model.train()


def _trainable(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _gradients(model, **call):
    params = _trainable(model)
    out = model(**call)
    found = torch.autograd.grad(out.loss, list(params.values()), allow_unused=True)
    return out, {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(params.items(), found, strict=True)}


def _check(model, per_example=True):
    """Loss and gradients of a loss-only call equal those before patching; returns the output and the reasons."""
    stock, want = _gradients(model, **BATCH)
    oracle = model_loop_gradients(model, **BATCH)
    apply_model_patches(model)
    out, got = _gradients(model, **BATCH, loss_only=True)
    torch.testing.assert_close(out.loss, stock.loss)
    assert relative_error(got, want) < CLOSE
    if per_example:
        assert relative_error(per_example_grads(model, engine="vmap")(_trainable(model), **BATCH), oracle) < CLOSE
    if out.logits is not None:
        torch.testing.assert_close(out.logits, stock.logits)
    reasons = [f.reason for f in patch_report(model).fallbacks]
    return out, {r.removeprefix(PREFIX) for r in reasons if r.startswith(PREFIX)}


def test_lora_beside_the_head():
    out, reasons = _check(_with_peft())
    assert out.logits is None
    assert not reasons


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"use_rslora": True}])
def test_lora_on_the_head(options):
    model = _with_peft(target_modules=["q_proj", "lm_head"], **options)
    trained = {name for name in _trainable(model) if "lm_head" in name}
    assert trained
    out, reasons = _check(model)
    assert out.logits is not None
    assert [r for r in reasons if r.endswith("(the head is a peft.tuners.lora.layer.Linear)")] == list(reasons) != []
    # switched off, the base layer is all there is
    with model.disable_adapter():
        assert model(**BATCH, loss_only=True).logits is None


def test_lora_put_on_the_head_after_patching():
    model = tiny_model("llama")
    apply_model_patches(model)
    peft = get_peft_model(model, LoraConfig(r=4, target_modules=["lm_head"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        peft.base_model.model.lm_head.lora_B["default"].weight.normal_()
    want, out = peft(**BATCH), peft(**BATCH, loss_only=True)
    torch.testing.assert_close(out.loss, want.loss)
    torch.testing.assert_close(out.logits, want.logits)


def test_a_merged_adapter_is_a_plain_head_again():
    model = _with_peft(target_modules=["lm_head"]).merge_and_unload()
    model.requires_grad_(True)
    out, reasons = _check(model)
    assert out.logits is None
    assert not reasons


def test_modules_to_save():
    model = _with_peft(modules_to_save=["lm_head"])
    assert any("modules_to_save" in name for name in _trainable(model))
    out, reasons = _check(model)
    assert out.logits is None
    assert not reasons
    want = model(**BATCH).loss
    with model.disable_adapter():
        original = model(**BATCH).loss
        assert original != want
        torch.testing.assert_close(model(**BATCH, loss_only=True).loss, original)


def test_two_adapters_with_heads_of_their_own():
    model = _with_peft(modules_to_save=["lm_head"])
    model.add_adapter("y", LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lm_head.modules_to_save.y" in name:
                p.mul_(-1.0)
    apply_model_patches(model)
    losses = []
    for adapter in ("x", "y"):
        model.set_adapter(adapter)
        out = model(**BATCH, loss_only=True)
        assert out.logits is None
        torch.testing.assert_close(out.loss, model(**BATCH).loss)
        losses.append(out.loss.item())
    assert losses[0] != losses[1]


# PEFT writes its trained rows into a copy of the weight, which functorch does not allow
@pytest.mark.parametrize("tied", [False, True])
def test_trainable_tokens(tied):
    model = _with_peft(tied, trainable_token_indices=[3, 5])
    assert any("token_adapter" in name for name in _trainable(model))
    out, reasons = _check(model, per_example=False)
    if tied:
        assert out.logits is not None
        assert reasons
    else:
        assert out.logits is None


class _Quantised(nn.Module):
    """A head whose weight is no matrix of floats, as those of bitsandbytes."""

    def __init__(self, linear):
        super().__init__()
        self.register_buffer("weight", (linear.weight.detach() * 32).round().to(torch.int8))

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) / 32)


class _Subclass(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1.0


@pytest.mark.parametrize("make", [_Quantised, _Subclass])
def test_another_class_of_head(make):
    model = tiny_model("llama")
    head = make(model.lm_head) if make is _Quantised else make(32, 97, bias=False)
    model.lm_head = head
    out, reasons = _check(model)
    assert out.logits is not None
    assert reasons == {f"no plain linear was called (the head is a {make.__module__}.{make.__name__})"}


class _Tensor(torch.Tensor):
    """Stands for DTensor and the tensors of quantisers."""


def test_a_weight_of_another_tensor_class():
    model = tiny_model("llama")
    weight = model.lm_head.weight.detach().as_subclass(_Tensor)
    del model.lm_head._parameters["weight"]
    vars(model.lm_head)["weight"] = weight
    model.lm_head.register_buffer("_keep", torch.zeros(()))
    apply_model_patches(model)
    out = model(**BATCH, loss_only=True)
    assert out.logits is not None
    assert "_Tensor" in patch_report(model).fallbacks[0].reason


def test_hooks_see_logits():
    """What tensor parallelism and offloading do: gather or move the output of the head."""
    model = tiny_model("llama")
    seen = []
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out) or out * 2)
    out, reasons = _check(model)
    assert out.logits is not None
    assert reasons == {"the head has hooks that look at its output"}
    assert all(isinstance(s, torch.Tensor) for s in seen)


def test_a_forward_that_somebody_wrapped_is_not_bypassed():
    model = tiny_model("llama")
    head, original = model.lm_head, model.lm_head.forward
    head.forward = MethodType(lambda self, x: original(x) * 3, head)
    out, reasons = _check(model)
    assert out.logits is not None
    assert reasons == {"no plain linear was called"}


def test_a_wrapper_put_on_after_us_is_respected():
    model = tiny_model("llama")
    apply_model_patches(model)
    head, ours = model.lm_head, model.lm_head.forward
    head.forward = MethodType(lambda self, x: ours(x) + 1.0, head)
    want, out = model(**BATCH), model(**BATCH, loss_only=True)
    torch.testing.assert_close(out.loss, want.loss)
    torch.testing.assert_close(out.logits, want.logits)
    head.forward = ours
    restore(model)


def test_a_parametrised_head():
    class Double(nn.Module):
        def forward(self, weight):
            return weight * 2

    model = tiny_model("llama")
    parametrize.register_parametrization(model.lm_head, "weight", Double())
    out, reasons = _check(model)
    assert out.logits is None
    assert not reasons


def test_a_head_with_bias():
    model = tiny_model("llama")
    bare, model.lm_head = model.lm_head, nn.Linear(32, 97)
    with torch.no_grad():
        model.lm_head.weight.copy_(bare.weight)
        model.lm_head.bias.normal_()
    out, reasons = _check(model)
    assert out.logits is None
    assert not reasons


def test_a_loss_of_the_users_own():
    def focal(logits, labels, vocab_size, **kwargs):
        flat, target = logits[:, :-1].reshape(-1, vocab_size).float(), labels[:, 1:].reshape(-1)
        p = flat.softmax(-1).gather(1, target.clamp(min=0)[:, None])[:, 0]
        return -((1 - p) ** 2 * p.log() * (target >= 0)).sum() / (target >= 0).sum()

    def smoothed(logits, labels, vocab_size, **kwargs):
        flat, target = logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1)
        return nn.CrossEntropyLoss(label_smoothing=0.1)(flat, target)

    def weighted(logits, labels, vocab_size, **kwargs):
        flat, target = logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1)
        return nn.functional.cross_entropy(flat, target, weight=torch.linspace(0.5, 2.0, vocab_size))

    for loss, fused in ((focal, False), (smoothed, True), (weighted, False)):
        model = tiny_model("llama")
        model.loss_function = loss
        out, reasons = _check(model)
        assert (out.logits is None) == fused
        assert len(reasons) == (not fused)


def test_a_copy_of_a_peft_model():
    model = _with_peft(modules_to_save=["lm_head"])
    apply_model_patches(model)
    other = copy.deepcopy(model)
    assert supports_loss_only(other)
    restore(model)
    torch.testing.assert_close(other(**BATCH, loss_only=True).loss, model(**BATCH).loss)


@pytest.mark.parametrize("trained", [["weight"], ["bias"], ["weight", "bias"]])
@pytest.mark.parametrize("losses", ["stock", "by row"])
def test_a_trained_head_in_the_batched_engine(losses, trained):
    """Weight, bias or both have an example axis, and a loss of one's own may take the rows one at a time."""
    model = tiny_model("llama")
    model.lm_head = nn.Linear(32, 97)
    model.requires_grad_(False)
    if losses == "by row":
        model.loss_function = _by_row
    apply_model_patches(model)
    for name in trained:
        getattr(model.lm_head, name).requires_grad_()
    # as many rows as tokens, so that a mixture of the two would have a shape that fits
    rows = tiny_batch(12, 12)
    got = per_example_grads(model, engine="batched")(_trainable(model), **rows)
    assert relative_error(got, model_loop_gradients(model, **rows)) < CLOSE


def _by_row(logits, labels, vocab_size, **kwargs):
    return nn.functional.cross_entropy(logits.reshape(-1, vocab_size), labels.reshape(-1))


_by_row.row_losses = lambda logits, labels: torch.stack(
    [_by_row(row, y, logits.shape[-1]) for row, y in zip(logits, labels, strict=True)]
)
