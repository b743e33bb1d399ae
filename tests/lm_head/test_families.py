"""A patched model's loss alone: the same loss and gradients as with logits, plain, per example and in one batch."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.func import functional_call, grad, vmap

from opake.checking.tiny import tiny_batch, tiny_model
from opake.errors import GenericFamilyWarning
from opake.functional import per_example_grads
from opake.patches import apply_model_patches, patch_report, restore
from opake.testing.oracle import model_loop_gradients, relative_error

# a softcap, a multiplied and a divided scale, a tied head, a head with bias, a mixture of experts
FAMILIES = {
    "llama": {},
    "gemma2": {"final_logit_softcapping": 5.0},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0},
    "qwen2": {"tie_word_embeddings": True},
    "gpt2": {},
    "phi3": {},
}
CLOSE = 1e-5


@pytest.fixture(params=FAMILIES)
def model(request):
    return tiny_model(request.param, **FAMILIES[request.param])


def _trainable(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _gradients(model, **call):
    params = _trainable(model)
    out = model(**call)
    found = torch.autograd.grad(out.loss, list(params.values()), allow_unused=True)
    grads = {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(params.items(), found, strict=True)}
    return out, grads


@pytest.mark.parametrize("chunk", [False, 16, True])
def test_loss_only_equals_the_ordinary_loss(model, chunk):
    batch = tiny_batch()
    stock, want = _gradients(model, **batch)
    apply_model_patches(model, chunked_linear_cross_entropy=chunk)
    out, got = _gradients(model, **batch, loss_only=True)
    assert out.logits is None
    torch.testing.assert_close(out.loss, stock.loss)
    assert relative_error(got, want) < CLOSE
    assert not patch_report(model).fallbacks
    # and with logits as before
    ordinary, again = _gradients(model, **batch)
    torch.testing.assert_close(ordinary.logits, stock.logits)
    assert relative_error(again, want) < CLOSE


def test_per_example_gradients(model):
    batch = tiny_batch()
    want = model_loop_gradients(model, **batch)
    apply_model_patches(model)
    params = _trainable(model)
    assert relative_error(per_example_grads(model, engine="vmap")(params, **batch), want) < CLOSE

    def loss(params, row):
        return functional_call(model, params, (), {**row, "loss_only": True}).loss

    by_hand = vmap(grad(loss), (None, 0))(params, batch)
    assert relative_error(by_hand, want) < CLOSE
    assert not patch_report(model).fallbacks


def test_a_frozen_head(model):
    """What LoRA training looks like to the head: hidden states that need a gradient, a weight that does not."""
    model.requires_grad_(False)
    norm = next(p for name, p in model.named_parameters() if "norm" in name or "ln_" in name)
    norm.requires_grad_(True)
    batch = tiny_batch()
    want = model_loop_gradients(model, **batch)
    apply_model_patches(model)
    assert relative_error(per_example_grads(model, engine="vmap")(_trainable(model), **batch), want) < CLOSE


# whether mixtures have a plugin is not this test's business
@pytest.mark.filterwarnings("ignore::opake.errors.GenericFamilyWarning")
def test_a_mixture_adds_its_auxiliary_loss():
    model = tiny_model("mixtral", router_aux_loss_coef=0.7)
    batch = {**tiny_batch(), "output_router_logits": True}
    stock, want = _gradients(model, **batch)
    apply_model_patches(model)
    out, got = _gradients(model, **batch, loss_only=True)
    assert out.logits is None
    torch.testing.assert_close(out.aux_loss, stock.aux_loss)
    torch.testing.assert_close(out.loss, stock.loss)
    assert relative_error(got, want) < CLOSE


def test_a_family_without_a_plugin_has_it_too():
    model = tiny_model("stablelm")
    batch = tiny_batch()
    stock, want = _gradients(model, **batch)
    with warnings.catch_warnings():
        # given once a process
        warnings.simplefilter("ignore", GenericFamilyWarning)
        report = apply_model_patches(model)
    assert report.family == "generic"
    assert report.find(flag="fused_linear_cross_entropy", state="applied")
    out, got = _gradients(model, **batch, loss_only=True)
    assert out.logits is None
    torch.testing.assert_close(out.loss, stock.loss)
    assert relative_error(got, want) < CLOSE


def test_scales_are_found_in_the_forward_not_in_the_config():
    model = tiny_model("cohere", logit_scale=0.3)
    apply_model_patches(model)
    batch = tiny_batch()
    before = model(**batch, loss_only=True).loss
    model.logit_scale = 2.0
    after = model(**batch, loss_only=True).loss
    assert after != before
    torch.testing.assert_close(after, model(**batch).loss)
    restore(model)
