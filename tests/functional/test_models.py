"""per_example_grads and clipped_grad of patched Transformers and PEFT models, against a loop on an unpatched copy."""

import functools
import warnings

import pytest
import torch
import torch.utils.checkpoint
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from opake.checking.tiny import tiny_batch, tiny_model
from opake.errors import EngineUnavailable, InputError, OptionTypeError, PatchError
from opake.functional import clipped_grad, make_functional, per_example_grads
from opake.patches import apply_model_patches, patched
from opake.testing.live import peak_live_bytes
from opake.testing.oracle import model_loop_gradients, relative_error
from opake.testing.trace import first_difference, operator_trace

LIMIT = 5e-6


def lora(model, targets="all-linear", seed=0):
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        # peft asks transformers by a name that is deprecated there
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    for name, p in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(p, std=0.2)
    return model


def pair(make):
    """The same model twice: patched, and stock."""
    model = make()
    apply_model_patches(model)
    return model, make()


def trainable(model):
    return make_functional(model, partition_trainable=True)[1]


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mistral", "gpt2"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("padding", ["right", "left", "none"])
def test_equals_the_loop(model_type, attention, padding):
    model, stock = pair(functools.partial(tiny_model, model_type, attention=attention))
    batch = tiny_batch(padding=padding)
    got = per_example_grads(model)(trainable(model), **batch)
    assert relative_error(got, model_loop_gradients(stock, **batch)) < LIMIT


@pytest.mark.parametrize("size", [1, 2, 4])
def test_microbatches(size):
    model, stock = pair(functools.partial(tiny_model, "llama"))
    batch = tiny_batch(rows=5)
    got = per_example_grads(model, microbatch_size=size)(trainable(model), **batch)
    assert relative_error(got, model_loop_gradients(stock, **batch)) < LIMIT


def test_tied_embeddings_stand_once_with_the_sum():
    model, stock = pair(functools.partial(tiny_model, "llama", tie_word_embeddings=True))
    params = trainable(model)
    assert "lm_head.weight" not in params
    got = per_example_grads(model)(params, **tiny_batch())
    assert relative_error(got, model_loop_gradients(stock, **tiny_batch())) < LIMIT


def test_lora_and_a_frozen_base():
    model, stock = pair(lambda: lora(tiny_model("llama")))
    params = trainable(model)
    assert params
    assert all("lora_" in name for name in params)
    got = per_example_grads(model, microbatch_size=2)(params, **tiny_batch())
    assert relative_error(got, model_loop_gradients(stock, **tiny_batch())) < LIMIT


def test_any_subset_of_the_parameters():
    model, stock = pair(functools.partial(tiny_model, "llama"))
    names = ["model.norm.weight", "model.layers.1.self_attn.q_proj.weight"]
    got = per_example_grads(model)({name: trainable(model)[name] for name in names}, **tiny_batch())
    for name, p in stock.named_parameters():
        p.requires_grad_(name in names)
    want = model_loop_gradients(stock, **tiny_batch())
    assert relative_error(got, {name: want[name] for name in got}) < LIMIT


def test_parameters_that_are_not_the_modules_own_are_the_ones_used():
    model, stock = pair(functools.partial(tiny_model, "llama"))
    other = {name: p * 1.5 for name, p in trainable(model).items()}
    with torch.no_grad():
        for p in stock.parameters():
            p.mul_(1.5)
    got = per_example_grads(model)(other, **tiny_batch())
    assert relative_error(got, model_loop_gradients(stock, **tiny_batch())) < LIMIT


def test_inputs_embeds_as_rows():
    model, stock = pair(functools.partial(tiny_model, "llama"))
    batch = tiny_batch()
    batch["inputs_embeds"] = torch.randn(3, batch["labels"].shape[1], 32)
    del batch["input_ids"]
    params = trainable(model)
    got = per_example_grads(model)(params, **batch)
    assert relative_error(got, model_loop_gradients(stock, **batch)) < LIMIT


def test_bfloat16_stays_near_and_in_its_dtype():
    make = functools.partial(tiny_model, "llama")
    model = make().to(torch.bfloat16)
    apply_model_patches(model)
    got = per_example_grads(model)(trainable(model), **tiny_batch())
    assert {g.dtype for g in got.values()} == {torch.bfloat16}
    assert relative_error(got, model_loop_gradients(make(), **tiny_batch())) < 0.1


def test_aux_is_the_other_outputs_of_each_row():
    model, stock = pair(functools.partial(tiny_model, "llama"))
    batch = tiny_batch()
    grads, aux = per_example_grads(model, has_aux=True, microbatch_size=2)(trainable(model), **batch)
    assert relative_error(grads, model_loop_gradients(stock, **batch)) < LIMIT
    with torch.no_grad():
        for i in range(3):
            want = stock(**{name: row[i : i + 1] for name, row in batch.items()}).logits[0]
            torch.testing.assert_close(aux["logits"][i], want, rtol=1e-4, atol=1e-5)


def checkpointed(model):
    function = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)
    return model


@pytest.mark.parametrize("adapters", [False, True])
def test_gradient_checkpointing(adapters):
    def make():
        model = checkpointed(tiny_model("llama"))
        return lora(model) if adapters else model

    model, stock = pair(make)
    got = per_example_grads(model)(trainable(model), **tiny_batch())
    assert relative_error(got, model_loop_gradients(stock, **tiny_batch())) < LIMIT


def test_dropout_draws_a_mask_for_every_row():
    model = tiny_model("llama", attention_dropout=0.5)
    apply_model_patches(model)
    batch = {name: row[:1].expand(3, -1) for name, row in tiny_batch().items()}
    got = per_example_grads(model)(trainable(model), **batch)["lm_head.weight"]
    assert not torch.equal(got[0], got[1])
    with pytest.raises(RuntimeError, match="random"):
        per_example_grads(model, randomness="error")(trainable(model), **batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_reach_each_other(dtype):
    model = tiny_model("llama").to(dtype)
    apply_model_patches(model)
    one, other = tiny_batch(padding="left"), tiny_batch(padding="left", seed=9)
    full = tiny_batch(padding="none", seed=5) | {"attention_mask": torch.ones_like(one["attention_mask"])}
    f = per_example_grads(model)
    results, traces = [], []
    for neighbours in (one, other, full):
        batch = {name: torch.cat([one[name][:1], neighbours[name][1:]]) for name in one}
        results.append(f(trainable(model), **batch))
        traces.append(operator_trace(lambda batch=batch: f(trainable(model), **batch)))
    for changed, trace in zip(results[1:], traces[1:], strict=True):
        assert all(torch.equal(results[0][name][0], changed[name][0]) for name in changed)
        assert first_difference(traces[0], trace) is None
    assert not torch.equal(results[0]["lm_head.weight"][1], results[1]["lm_head.weight"][1])


def test_clipped_sum_and_poisoned_rows():
    model, stock = pair(lambda: lora(tiny_model("llama")))
    batch = tiny_batch(rows=5)
    want = model_loop_gradients(stock, **batch)
    norms = torch.stack([torch.cat([g[i].flatten() for g in want.values()]).double().norm() for i in range(5)])
    bound = float(norms.median())
    out = clipped_grad(model, clip_norm=bound, microbatch_size=2)(trainable(model), **batch)
    torch.testing.assert_close(out.norms.double(), norms, rtol=1e-5, atol=0)
    scale = (bound / norms).clamp(max=1)
    summed = {n: torch.einsum("b,b...->...", scale, g.double()) for n, g in want.items()}
    assert relative_error(out.grads, summed) < LIMIT
    assert int(out.clipped) in (2, 3)

    embeds = stock.get_input_embeddings()(batch.pop("input_ids")).detach()
    embeds[3] = torch.nan
    out = clipped_grad(model, clip_norm=bound, microbatch_size=2)(trainable(model), inputs_embeds=embeds, **batch)
    scale[3] = 0
    summed = {n: torch.einsum("b,b...->...", scale, g.double()) for n, g in want.items()}
    assert relative_error(out.grads, summed) < LIMIT
    assert int(out.nonfinite) == 1


def test_a_row_without_labels_adds_nothing():
    model = tiny_model("llama")
    apply_model_patches(model)
    batch = tiny_batch()
    batch["labels"][1] = -100
    out = clipped_grad(model, clip_norm=1.0)(trainable(model), **batch)
    assert out.norms[1] == 0
    assert out.losses[1] == 0
    assert int(out.nonfinite) == 0


def test_zero_rows_do_not_call_the_model(monkeypatch):
    model = tiny_model("llama")
    apply_model_patches(model)

    def never(*args, **kwargs):
        raise AssertionError("called")

    params = trainable(model)
    monkeypatch.setattr(model, "forward", never)
    empty = {name: row[:0] for name, row in tiny_batch().items()}
    out = clipped_grad(model, clip_norm=1.0)(params, **empty)
    assert all(g.shape == params[name].shape and g.eq(0).all() for name, g in out.grads.items())
    assert per_example_grads(model)(params, **empty)["lm_head.weight"].shape == (0, *params["lm_head.weight"].shape)


@pytest.mark.parametrize("make", [lambda: tiny_model("llama"), lambda: lora(tiny_model("llama"))])
def test_a_model_that_is_not_patched_is_refused(make):
    model = make()
    with pytest.raises(PatchError, match=r"LlamaForCausalLM is not patched.*apply_model_patches\(model\) first"):
        per_example_grads(model)
    with patched(model):
        clipped_grad(model, clip_norm=1.0)
    with pytest.raises(PatchError, match="not patched"):
        clipped_grad(model, clip_norm=1.0)


def test_wrong_use_of_a_model():
    model = tiny_model("llama")
    apply_model_patches(model)
    batch = tiny_batch()
    f = per_example_grads(model)
    with pytest.raises(InputError, match="returned no loss for the rows input_ids, attention_mask; pass labels"):
        f(trainable(model), input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    with pytest.raises(OptionTypeError, match="passed by name, got 1 positional"):
        f(trainable(model), batch["input_ids"])
    with pytest.raises(InputError, match="input_ids has 3 rows, but labels has 2"):
        f(trainable(model), input_ids=batch["input_ids"], labels=batch["labels"][:2])
    with pytest.raises(InputError, match=r"no parameter 'lm_head.wieght'; the nearest is 'lm_head.weight'"):
        f({"lm_head.wieght": model.lm_head.weight}, **batch)


def test_batched_is_refused_with_the_parameters_that_stand_in_the_way():
    model = tiny_model("llama")
    apply_model_patches(model)
    with pytest.raises(
        EngineUnavailable, match=r"trainable parameters are consumed by an op without an example axis: "
    ):
        per_example_grads(model, engine="batched")(trainable(model), **tiny_batch())
    out = clipped_grad(model, clip_norm=1.0)(trainable(model), **tiny_batch())
    assert out.engine == "vmap"
    assert "without an example axis: model.embed_tokens.weight" in out.reason


def four_layers():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).train()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_peak_memory_is_that_of_an_ordinary_step_and_the_gradients(attention):
    def make():
        model = four_layers()
        model.set_attn_implementation(attention)
        return model

    batch = tiny_batch(tokens=64)
    stock = make()
    ordinary = peak_live_bytes(lambda: stock(**batch, use_cache=False).loss.backward())
    params = make_functional(stock)[1]
    budget = 1.1 * ordinary + sum(p.numel() * p.element_size() for p in params.values()) * 3

    def peak(model):
        apply_model_patches(model)
        params = trainable(model)
        return peak_live_bytes(lambda: per_example_grads(model)(params, **batch))

    assert peak(make()) <= budget
    assert peak(checkpointed(make())) <= 0.8 * budget
