"""Routers: by token id, with jitter, with an auxiliary loss, and recurrent layers beside them in eval mode."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call, grad, vmap

from opake.checking.tiny import tiny_batch, tiny_model
from opake.patches import apply_model_patches
from opake.testing.oracle import model_loop_gradients, relative_error
from opake.testing.vmapped import vmap_gradients

LIMIT = 5e-6
HYBRID = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


def test_router_by_token_id():
    """The first layer of DeepSeek-V4 asks a table which experts an id goes to; other ids, other experts."""
    stock, model = (tiny_model("deepseek_v4", attention="eager") for _ in "ab")
    assert [type(m).__name__ for m in model.modules() if type(m).__name__.endswith("HashRouter")]
    apply_model_patches(model)
    rows = tiny_batch(padding="left")
    for ids in (rows["input_ids"], rows["input_ids"].roll(3, 0), torch.full_like(rows["input_ids"], 5)):
        batch = {**rows, "input_ids": ids}
        assert relative_error(vmap_gradients(model, batch), model_loop_gradients(stock, **batch)) <= LIMIT


@pytest.mark.parametrize(
    ("model_type", "noise"), [("mixtral", "router_jitter_noise"), ("phimoe", "input_jitter_noise")]
)
def test_jitter(model_type, noise):
    """Drawn anew for each example with randomness="different", and the same again from the same seed."""
    model = tiny_model(model_type, **{noise: 0.3})
    apply_model_patches(model)
    params = {name: p.detach() for name, p in model.named_parameters() if name.endswith("q_proj.weight")}
    ids = tiny_batch(rows=1, padding="none")["input_ids"].repeat(2, 1)

    def loss(params, ids):
        return functional_call(model, params, kwargs={"input_ids": ids, "labels": ids}).loss

    def run(seed):
        torch.manual_seed(seed)
        return vmap(grad(loss), (None, 0), randomness="different")(params, ids)

    first, again, other = run(0), run(0), run(1)
    for name, rows in first.items():
        assert rows.isfinite().all()
        assert not torch.allclose(rows[0], rows[1])
        assert torch.equal(rows, again[name])
        assert not torch.allclose(rows, other[name])


def test_jitter_needs_to_be_told():
    """torch's own word for it, at a place that draws."""
    model = tiny_model("mixtral", router_jitter_noise=0.3)
    apply_model_patches(model)
    with pytest.raises(RuntimeError, match="randomness"):
        vmap_gradients(model, tiny_batch(), randomness="error")


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "phimoe"])
def test_router_loss_is_of_one_row(model_type):
    """Bit for bit the same beside any neighbours, and without them."""
    model = tiny_model(model_type, output_router_logits=True, router_aux_loss_coef=3.0).eval()
    apply_model_patches(model)
    rows = tiny_batch(padding="left")
    others = {name: value.clone() for name, value in rows.items()}
    others["input_ids"][[0, 2]] = rows["input_ids"][[0, 2]].flip(1)
    others["attention_mask"][2] = 1
    first, second = vmap_gradients(model, rows), vmap_gradients(model, others)
    assert all(torch.equal(first[name][1], second[name][1]) for name in first)
    alone = vmap_gradients(model, {name: value[1:2] for name, value in rows.items()})
    assert relative_error({name: g[1:2] for name, g in first.items()}, alone) <= LIMIT


def test_router_loss_of_a_sampling_router():
    stock, model = (tiny_model("phimoe", router_aux_loss_coef=3.0).eval() for _ in "ab")
    rows = tiny_batch(padding="left")
    want = model_loop_gradients(stock, **rows, output_router_logits=True)
    assert relative_error(model_loop_gradients(stock, **rows), want) > 1e-2, "the loss is large enough to be seen"
    apply_model_patches(model)
    assert relative_error(vmap_gradients(model, rows, output_router_logits=True), want) <= LIMIT


@pytest.mark.parametrize(
    ("model_type", "sizes"), [("phimoe", {}), ("llama4_text", {"moe_layers": [0], "intermediate_size_mlp": 48})]
)
def test_activation_of_the_config(model_type, sizes):
    """Of the two families outside of the common suite."""
    stock, model, silu = (tiny_model(model_type, **sizes, hidden_act=act).eval() for act in ("gelu", "gelu", "silu"))
    apply_model_patches(model)
    rows = tiny_batch()
    want = model_loop_gradients(stock, **rows)
    assert relative_error(vmap_gradients(model, rows), want) <= LIMIT
    assert relative_error(model_loop_gradients(silu, **rows), want) > 1e-2


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_moe_text"])
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("flags", [{}, {"performance": False}, {"kv_cache": False}])
def test_no_cache_is_written_inside_transforms(model_type, mode, flags):
    stock, model = (tiny_model(model_type, **HYBRID).train(mode == "train") for _ in "ab")
    for each in (stock, model):
        for name, parameter in each.named_parameters():
            if name.endswith("A_log"):
                # a state that decays within a token or two loses its digits in the chunked sum
                parameter.data.sub_(parameter.data.mean() + 1)
    assert model.config.use_cache
    apply_model_patches(model, **flags)
    rows = tiny_batch(padding="right")
    assert relative_error(vmap_gradients(model, rows), model_loop_gradients(stock, **rows)) <= LIMIT
