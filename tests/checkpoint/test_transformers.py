"""RematCheckpoint as the checkpointing function of stock Transformers models, by public interfaces alone."""

import functools

import pytest
import torch
import torch.utils.checkpoint as stock
from torch.func import functional_call, grad, vmap
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from opake.checkpoint import RematCheckpoint
from opake.testing.live import peak_live_bytes
from opake.testing.oracle import model_loop_gradients, relative_error

V = 61


def llama():
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=88,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


def gpt2():
    config = GPT2Config(
        vocab_size=V,
        n_embd=32,
        n_layer=4,
        n_head=4,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
    )
    return GPT2LMHeadModel(config)


def built(make):
    torch.manual_seed(0)
    model = make().train()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.2)
    return model


def per_example(model, ids, labels):
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(p, i, y):
        return functional_call(model, p, (), {"input_ids": i[None], "labels": y[None], "use_cache": False}).loss

    return vmap(grad(loss), (None, 0, 0))(params, ids, labels)


@pytest.mark.parametrize("make", [llama, gpt2])
def test_gradients_are_exact_and_memory_is_saved(make):
    ids = torch.randint(3, V, (3, 48), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[1, 30:] = -100
    plain, model = built(make), built(make)
    function = RematCheckpoint(functools.partial(stock.checkpoint, use_reentrant=False))
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)
    want = model_loop_gradients(plain, input_ids=ids, labels=labels)
    assert relative_error(per_example(model, ids, labels), want) < 5e-6
    peaks = [peak_live_bytes(lambda m=m: per_example(m, ids, labels)) for m in (model, plain)]
    assert peaks[0] < 0.5 * peaks[1]


def test_outside_transforms_stock_checkpointing_still_serves():
    ids = torch.randint(3, V, (3, 12), generator=torch.Generator().manual_seed(1))
    plain, model = built(llama), built(llama)
    calls = []

    def counted(*args, **kwargs):
        calls.append(1)
        return stock.checkpoint(*args, use_reentrant=False, **kwargs)

    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=RematCheckpoint(counted))
    got, want = (model_loop_gradients(m, input_ids=ids, labels=ids) for m in (model, plain))
    assert relative_error(got, want) < 1e-6
    assert len(calls) == 4 * 3
