"""Adapters cast once a step: the same numbers as cast a call at a time, with fewer casts, and nothing left behind."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

from opake.functional import per_example_grads, watch
from opake.lora import ahead as adapters
from opake.patches import apply_model_patches
from opake_kernels.lora import ahead

V, LAYERS = 23, 2


@pytest.fixture
def model():
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
    )
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = get_peft_model(base, LoraConfig(r=2, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data = torch.randn_like(p) * 0.1
    apply_model_patches(model)
    return model.train()


def trainable(model):
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


class Casts(TorchDispatchMode):
    """Counts the launches that copy float32 into bfloat16."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            self.count += args[0].dtype == torch.float32 and kwargs.get("dtype") == torch.bfloat16
        elif func is torch.ops.aten.copy_.default:
            self.count += args[1].dtype == torch.float32 and args[0].dtype == torch.bfloat16
        elif func is torch.ops.aten._foreach_copy_.default:
            self.count += args[1][0].dtype == torch.float32 and args[0][0].dtype == torch.bfloat16
        return func(*args, **kwargs)


def run(model, engine):
    ids = torch.randint(0, V, (3, 6), generator=torch.Generator().manual_seed(1))
    return per_example_grads(model, engine=engine)(trainable(model), input_ids=ids, labels=ids)


@pytest.mark.parametrize("engine", ["vmap", "batched"])
def test_the_gradients_are_the_same_bits(model, engine, monkeypatch):
    run(model, engine)
    with Casts() as few:
        got = run(model, engine)
    monkeypatch.setattr(adapters, "casting", lambda *_: watch.contextlib.nullcontext())
    with Casts() as many:
        want = run(model, engine)
    assert all(g.dtype == torch.float32 for g in got.values())
    assert all(torch.equal(got[name], want[name]) for name in want)
    # q, k and v; o; gate and up; down: all factors of each at once, forward and backward
    assert many.count - few.count == LAYERS * 4 * 2 - 1
    assert not ahead._copies


def test_nothing_is_left_after_an_error(model):
    params = trainable(model)
    first = next(iter(params.values()))

    def fail():
        with ahead.cast_ahead([first], torch.bfloat16):
            assert ahead._copies
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not ahead._copies


def test_factors_of_one_input_lie_side_by_side(model):
    found = adapters.lower_precision(model)
    assert found is not None
    names, dtype = found
    assert dtype == torch.bfloat16
    params = trainable(model)
    assert sorted(names) == sorted(params)
    of = {
        name.split(".lora_")[0].rsplit(".", 1)[1]: params[name].mT
        for name in names
        if "layers.0" in name and "_A" in name
    }
    inputs = [of[name] for name in ("q_proj", "k_proj", "v_proj")]
    want = torch.cat([a.to(dtype) for a in inputs], 1)
    with adapters.casting(found, params):
        made = ahead.ready(inputs, dtype)
        assert (
            made[0].untyped_storage().data_ptr() == next(iter(ahead._copies.values())).made.untyped_storage().data_ptr()
        )
        assert torch.equal(ahead.beside(made), want)
        assert ahead.beside(made[::2]) is None
        assert ahead.beside([made[0], made[0].clone()]) is None
    assert ahead.beside(inputs) is None
    # those that a call makes for itself do so too
    assert torch.equal(ahead.beside(ahead.ready(inputs, dtype, 3)), want)


@pytest.mark.parametrize("turned", range(4))
def test_factors_made_by_a_call_have_its_numbers(turned):
    dtype = torch.bfloat16
    factors = [
        torch.randn(3, 8).mT,
        torch.randn(8, 2),
        torch.randn(2, 5, 8).mT,
        torch.randn(6, 4, 2)[:, ::2],
        torch.randn(1, 7).expand(4, 7),
        torch.randn(3, 3, dtype=dtype),
    ]
    for made, given in zip(ahead.ready(factors, dtype, turned), factors, strict=True):
        assert torch.equal(made, given.to(dtype))
    (alone,) = ahead.ready(factors[:1], dtype, turned)
    assert torch.equal(alone, factors[0].to(dtype))
    assert alone.stride() == factors[0].stride()
    assert ahead.ready(factors[5:], dtype, turned)[0] is factors[5]


def test_frozen_factors_and_other_dtypes_are_left_to_the_calls(model):
    for name, p in model.named_parameters():
        if "lora_A" in name:
            p.requires_grad_(False)
    params = trainable(model)
    with adapters.casting(adapters.lower_precision(model), params):
        assert len(ahead._copies) == len(params)
    model.float()
    assert adapters.lower_precision(model) is None


@pytest.mark.parametrize("outside", [torch.no_grad, torch.enable_grad])
def test_it_does_not_matter_who_differentiates_outside(model, outside):
    ids = torch.randint(0, V, (3, 6), generator=torch.Generator().manual_seed(1))
    want = run(model, "batched")
    with outside():
        # parameters as they are, not detached
        params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        got = per_example_grads(model, engine="batched")(params, input_ids=ids, labels=ids)
    assert all(torch.equal(got[name], want[name]) for name in want)
