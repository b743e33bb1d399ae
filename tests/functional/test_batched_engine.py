"""The batched engine and the choice of engines, with ops that know the example axis put in by hand.

The LoRA linears and norms of a patched model are replaced by plain torch that accepts a leading example axis, and
recorded in the model's patch state as the patch engine records its own.
"""

import functools
import types
import warnings

import pytest
import torch
import torch.utils.checkpoint
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear as LoraLinear

from opake.checking.tiny import tiny_batch, tiny_model
from opake.errors import EngineUnavailable
from opake.functional import clipped_grad, make_functional, per_example_grads
from opake.functional.batched_engine import causal_row_losses
from opake.patches import apply_model_patches, patch_report, restore
from opake.patching.state import Applied, axis_parameters, state_of
from opake.patching.undo import Undo, put
from opake.records import Record
from opake.testing.oracle import model_loop_gradients, relative_error
from opake.testing.trace import first_difference, operator_trace


class AxisAware(Record):
    """Says that its site takes these parameters with an example axis."""

    def __init__(self, *names):
        object.__setattr__(self, "names", names)

    def axis_parameters(self, module):
        return frozenset(self.names)

    def __str__(self):
        return "AxisAware"


def lora_linear(self, x):
    a, b, s = self.lora_A["default"].weight, self.lora_B["default"].weight, self.scaling["default"]
    return self.base_layer(x) + s * ((x @ a.transpose(-1, -2)) @ b.transpose(-1, -2))


def norm(self, x):
    w = self.weight if self.weight.dim() == 1 else self.weight[:, None]
    h = x.float()
    return w * (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.variance_epsilon)).to(x.dtype)


def built(train_norms=True, checkpointing=False):
    model = tiny_model("llama")
    if checkpointing:
        function = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        # peft asks transformers by a name that is deprecated there
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, p in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(p, std=0.2)
        elif "norm" in name:
            p.requires_grad_(train_norms)
    return model


def axis_aware(model):
    apply_model_patches(model)
    inner = model.get_base_model()
    for site, module in inner.named_modules():
        if isinstance(module, LoraLinear):
            change = put(module, "forward", types.MethodType(lora_linear, module))
            names = ("lora_A.default.weight", "lora_B.default.weight")
        elif type(module).__name__ == "LlamaRMSNorm":
            change = put(module, "forward", types.MethodType(norm, module))
            names = ("weight",)
        else:
            continue
        state_of(inner).applied.append(Applied(AxisAware(*names), site, module, Undo([change])))
    return model


def trainable(model):
    return make_functional(model, partition_trainable=True)[1]


@pytest.mark.parametrize("padding", ["right", "left", "none"])
@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_auto_takes_it_and_it_equals_the_loop_and_vmap(padding, size, checkpointing):
    model, stock = axis_aware(built(checkpointing=checkpointing)), built()
    batch, params = tiny_batch(padding=padding), trainable(model)
    assert any("norm" in name for name in params)
    got = per_example_grads(model, microbatch_size=size)(params, **batch)
    assert relative_error(got, model_loop_gradients(stock, **batch)) < 5e-6
    by_vmap = per_example_grads(model, engine="vmap")(params, **batch)
    assert relative_error(got, by_vmap) < 5e-6


def test_clipped_sums_of_both_engines_agree_and_say_who_made_them():
    model, batch = axis_aware(built()), tiny_batch(rows=5)
    batch["labels"][2] = -100
    outs = {
        e: clipped_grad(model, clip_norm=3.0, microbatch_size=2, engine=e)(trainable(model), **batch)
        for e in ("auto", "vmap", "batched")
    }
    assert {e: out.engine for e, out in outs.items()} == {"auto": "batched", "vmap": "vmap", "batched": "batched"}
    for engine in ("auto", "batched"):
        assert relative_error(outs[engine].grads, outs["vmap"].grads) < 5e-6
        torch.testing.assert_close(outs[engine].norms, outs["vmap"].norms)
        torch.testing.assert_close(outs[engine].losses, outs["vmap"].losses)
    assert outs["auto"].norms[2] == 0
    assert "every trainable parameter is consumed by an op that takes the example axis" in outs["auto"].reason
    assert "engine='vmap' was asked for" in outs["vmap"].reason
    assert "engine='batched' was asked for" in outs["batched"].reason


def test_no_transform_runs(monkeypatch):
    from opake.attention import forward
    from opake.transforms import inside_transform

    model, batch, seen = axis_aware(built()), tiny_batch(), []
    stock = forward.sdpa_attention_forward

    def watched(*args, **kwargs):
        seen.append(inside_transform())
        return stock(*args, **kwargs)

    monkeypatch.setattr(forward, "sdpa_attention_forward", watched)
    per_example_grads(model)(trainable(model), **batch)
    assert seen
    assert not any(seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_reach_each_other(dtype):
    model = axis_aware(built().to(dtype))
    one, other = tiny_batch(padding="left"), tiny_batch(padding="left", seed=9)
    full = tiny_batch(padding="none", seed=5) | {"attention_mask": torch.ones_like(one["attention_mask"])}
    f = per_example_grads(model, engine="batched")
    batches = [{n: torch.cat([one[n][:1], neighbours[n][1:]]) for n in one} for neighbours in (one, other, full)]
    results = [f(trainable(model), **batch) for batch in batches]
    traces = [operator_trace(lambda batch=batch: f(trainable(model), **batch)) for batch in batches]
    for changed, trace in zip(results[1:], traces[1:], strict=True):
        assert all(torch.equal(results[0][name][0], changed[name][0]) for name in changed)
        assert first_difference(traces[0], trace) is None


def test_a_poisoned_row_stays_alone():
    model, batch = axis_aware(built()), tiny_batch()
    clean = per_example_grads(model, engine="batched")(trainable(model), **batch)
    embeds = model.get_input_embeddings()(batch.pop("input_ids")).detach()
    embeds[1] = torch.nan
    got = per_example_grads(model, engine="batched")(trainable(model), inputs_embeds=embeds, **batch)
    for name in clean:
        torch.testing.assert_close(got[name][[0, 2]], clean[name][[0, 2]], rtol=1e-4, atol=1e-6)


def test_one_blind_parameter_sends_auto_to_vmap():
    model, batch = axis_aware(built()), tiny_batch()
    model.get_input_embeddings().weight.requires_grad_()
    out = clipped_grad(model, clip_norm=1.0)(trainable(model), **batch)
    assert out.engine == "vmap"
    assert (
        "1 of 34 trainable parameters are consumed by an op without an example axis: base_model.model.model.embed"
        in out.reason
    )
    with pytest.raises(EngineUnavailable, match="PeftModelForCausalLM: 1 of 34 trainable parameters"):
        per_example_grads(model, engine="batched")(trainable(model), **batch)


def test_a_tied_parameter_is_blind_where_one_of_its_ops_is():
    model = tiny_model("llama", tie_word_embeddings=True)
    apply_model_patches(model)
    # the loss takes it with an example axis, the embedding does not
    assert "lm_head.weight" in axis_parameters(model)
    params = {"model.embed_tokens.weight": model.lm_head.weight}
    assert clipped_grad(model, clip_norm=1.0)(params, **tiny_batch()).engine == "vmap"


@pytest.mark.parametrize("bias", [False, True])
def test_a_trainable_head(bias):
    model, batch = tiny_model("llama"), tiny_batch()
    if bias:
        bare, model.lm_head = model.lm_head, torch.nn.Linear(32, 97)
        model.lm_head.weight.data.copy_(bare.weight.data)
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    want = model_loop_gradients(model, **batch)
    apply_model_patches(model)
    got = per_example_grads(model, engine="batched")(trainable(model), **batch)
    assert relative_error(got, want) < 1e-5
    assert not patch_report(model).fallbacks


@pytest.mark.parametrize(
    ("options", "extra", "text"),
    [
        ({"has_aux": True}, {}, "has_aux"),
        ({"randomness": "same"}, {}, "randomness='same' is kept by the vmap engine alone"),
        ({}, {"num_items_in_batch": torch.ones(3)}, "per-row losses need labels and nothing else"),
        ({}, {"labels": None}, "per-row losses need labels"),
    ],
)
def test_what_only_vmap_can_do(options, extra, text):
    model = axis_aware(built())
    f = per_example_grads(model, engine="batched", **options)
    with pytest.raises(EngineUnavailable, match=text):
        f(trainable(model), **tiny_batch() | extra)


def test_a_loss_or_rows_that_nothing_vouches_for():
    model, batch = axis_aware(built()), tiny_batch()
    inner, f, params = model.get_base_model(), clipped_grad(model, clip_norm=1.0), trainable(model)
    causal = inner.loss_function
    assert f(params, **batch).engine == "batched"
    inner.loss_function = lambda logits, labels, **kw: causal(logits, labels, **kw) * 2
    assert "the loss of LlamaForCausalLM is not known per row" in f(params, **batch).reason
    inner.loss_function = causal
    assert f(params, **batch).engine == "batched"
    inner.config.output_router_logits = True
    assert "auxiliary loss" in f(params, **batch).reason
    inner.config.output_router_logits = False
    inner.add_module("bn", torch.nn.BatchNorm1d(3))
    assert "mixes the rows" in clipped_grad(model, clip_norm=1.0)(params, **batch).reason


def test_the_choice_is_made_anew_when_the_model_is_patched_otherwise():
    model = tiny_model("llama")
    params = {"model.norm.weight": model.model.norm.weight}
    apply_model_patches(model, rms_norm=True)
    f = clipped_grad(model, clip_norm=1.0)
    first = f(params, **tiny_batch())
    restore(model)
    apply_model_patches(model, rms_norm=False)
    second = f(params, **tiny_batch())
    assert (first.engine, second.engine) == ("batched", "vmap")
    assert relative_error(first.grads, second.grads) < 5e-6


def test_shared_rows_are_repeated():
    model, batch = axis_aware(built()), tiny_batch()
    batch["position_ids"] = torch.arange(batch["labels"].shape[1]) + 3
    dims = {"position_ids": None}
    got, want = (
        per_example_grads(model, engine=e, in_dims=dims, microbatch_size=2)(trainable(model), **batch)
        for e in ("batched", "vmap")
    )
    assert relative_error(got, want) < 5e-6
    batch["position_ids"] = batch["position_ids"].expand(3, -1)
    assert relative_error(per_example_grads(model, engine="batched")(trainable(model), **batch), want) < 5e-6


def test_a_loss_that_offers_row_losses_is_taken():
    model, batch = axis_aware(built()), tiny_batch()
    inner = model.get_base_model()
    causal = inner.loss_function

    def doubled(logits, labels, **kw):
        return causal(logits, labels, **kw) * 2

    doubled.row_losses = lambda logits, labels: causal_row_losses(logits, labels) * 2
    want = per_example_grads(model, engine="vmap")(trainable(model), **batch)
    inner.loss_function = doubled
    got = per_example_grads(model, engine="batched")(trainable(model), **batch)
    assert relative_error(got, {name: 2 * g for name, g in want.items()}) < 5e-6


def test_row_losses_equal_the_models_own():
    logits, labels = torch.randn(3, 6, 11), torch.randint(0, 11, (3, 6))
    labels[1, 3:] = -100
    labels[2] = -100
    got = causal_row_losses(logits.to(torch.bfloat16), labels)
    low = logits.to(torch.bfloat16).float()
    want = [torch.nn.functional.cross_entropy(low[i, :-1], labels[i, 1:]) for i in range(2)]
    torch.testing.assert_close(got[:2], torch.stack(want))
    assert got[2] == 0
    assert got.dtype == torch.float32


def test_zero_rows_do_not_call_the_model():
    model = axis_aware(built())
    model.get_base_model().lm_head.forward = None
    out = clipped_grad(model, clip_norm=1.0)(trainable(model), **{n: row[:0] for n, row in tiny_batch().items()})
    assert out.engine == "batched"
    assert all(g.eq(0).all() for g in out.grads.values())
