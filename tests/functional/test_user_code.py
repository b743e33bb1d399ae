"""Models that users have put something into - hooks, wrappers, checkpoints, packed rows - stay right or say why."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import nn
from torch.func import functional_call, grad, vmap
from transformers import LlamaConfig, LlamaForCausalLM

from opake.errors import EngineUnavailable, InputError, OptionTypeError
from opake.functional import clipped_grad, per_example_grads
from opake.patches import apply_model_patches, apply_runtime_patches, patch_report, restore_runtime

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


def llama(lora: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model.train()


def trainable(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def loop(model: nn.Module, **options: object) -> dict[str, torch.Tensor]:
    params, rows = trainable(model), []
    for i in range(len(IDS)):
        batch = {"input_ids": IDS[i : i + 1], "labels": IDS[i : i + 1], **options}
        rows.append(torch.autograd.grad(model(**batch).loss, list(params.values())))
    return {name: torch.stack(g) for name, g in zip(params, zip(*rows, strict=True), strict=True)}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, e in expected.items():
        assert float((found[name] - e).abs().max() / e.abs().max().clamp(min=1e-9)) < 1e-5, name


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("engine", ["auto", "vmap", "batched"])
def test_checkpointed_adapters_get_their_gradients(engine: str, reentrant: bool) -> None:
    model = llama()
    expected = loop(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    apply_model_patches(model)
    assert_equal(per_example_grads(model, engine=engine)(trainable(model), input_ids=IDS, labels=IDS), expected)


def test_a_cut_in_the_graph_is_noticed() -> None:
    model = llama()
    expected = loop(model)
    apply_model_patches(model)
    layer = model.base_model.model.model.layers[1]
    stock = layer.forward
    layer.forward = lambda *a, **k: torch.utils.checkpoint.checkpoint(lambda: stock(*a, **k), use_reentrant=True)
    with pytest.raises(EngineUnavailable, match=r"hook or a forward|does not reach"):
        per_example_grads(model, engine="batched")(trainable(model), input_ids=IDS, labels=IDS)
    del layer.forward
    unused = nn.Parameter(torch.zeros(2))
    model.base_model.model.lm_head.register_parameter("unused", unused)
    params = trainable(model)
    found = clipped_grad(model, clip_norm=1e9)(params, input_ids=IDS, labels=IDS)
    assert found.grads["base_model.model.lm_head.unused"].tolist() == [0.0, 0.0]
    total = {name: g.sum(0) for name, g in expected.items()}
    assert_equal(found.grads, total)


@pytest.mark.parametrize("place", ["model.embed_tokens", "model.layers.0", "lm_head"])
def test_hooks_that_mix_rows_rule_the_batched_engine_out(place: str) -> None:
    model = llama()
    apply_model_patches(model)
    f = clipped_grad(model, clip_norm=1.0)
    assert f(trainable(model), input_ids=IDS, labels=IDS).engine == "batched"
    inner = model.base_model.model

    def mix(module: nn.Module, args: object, output: object) -> object:
        first = output[0] if isinstance(output, tuple) else output
        mixed = first + first.mean(0, keepdim=True)
        return (mixed, *output[1:]) if isinstance(output, tuple) else mixed

    handle = inner.get_submodule(place).register_forward_hook(mix)
    expected = loop(model)
    result = f(trainable(model), input_ids=IDS, labels=IDS)
    assert result.engine == "vmap"
    assert "hook" in result.reason
    assert_equal(per_example_grads(model)(trainable(model), input_ids=IDS, labels=IDS), expected)
    handle.remove()
    assert f(trainable(model), input_ids=IDS, labels=IDS).engine == "batched"


@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig])
def test_parameters_outside_the_model_go_to_vmap(kind: type) -> None:
    torch.manual_seed(0)
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(**SIZES)), kind(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    expected = loop(model)
    apply_model_patches(model)
    assert_equal(per_example_grads(model)(trainable(model), input_ids=IDS, labels=IDS), expected)


PACKED = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 3]])


@pytest.mark.parametrize("use_cache", [None, False])
@pytest.mark.parametrize("engine", ["auto", "vmap"])
def test_packed_rows_follow_stock(engine: str, use_cache: bool | None) -> None:
    model, rows = llama(), []
    options = {} if use_cache is None else {"use_cache": use_cache}
    params = trainable(model)
    for i in range(3):
        batch = {"input_ids": IDS[i : i + 1], "labels": IDS[i : i + 1], "position_ids": PACKED[i : i + 1]}
        rows.append(torch.autograd.grad(model(**batch, **options).loss, list(params.values())))
    expected = {name: torch.stack(g) for name, g in zip(params, zip(*rows, strict=True), strict=True)}
    stock = model(input_ids=IDS, position_ids=PACKED).logits
    apply_runtime_patches()
    try:
        apply_model_patches(model)
        torch.testing.assert_close(model(input_ids=IDS, position_ids=PACKED).logits, stock)
        batch = {"input_ids": IDS, "labels": IDS, "position_ids": PACKED, **options}
        found = per_example_grads(model, engine=engine, in_dims={"use_cache": None} if options else None)(
            params, **batch
        )
        assert_equal(found, expected)
    finally:
        restore_runtime()


def test_packed_rows_without_the_runtime_patch_are_refused() -> None:
    model = llama()
    apply_model_patches(model)
    with pytest.raises(InputError, match="apply_runtime_patches"):
        per_example_grads(model, in_dims={"use_cache": None})(
            trainable(model), input_ids=IDS, labels=IDS, position_ids=PACKED, use_cache=False
        )


@pytest.mark.parametrize("place", ["model.layers.0.mlp", "model.layers.0.input_layernorm", "model.norm"])
def test_a_forward_put_in_before_patching_is_kept(place: str) -> None:
    model = llama(lora=False)
    module = model.get_submodule(place)
    stock = module.forward
    module.forward = lambda x: stock(x) * 1.5
    expected, logits = loop(model), model(IDS).logits
    report = apply_model_patches(model, **KERNELS)
    assert any(row.site == place and "was replaced" in row.reason for row in report.rows)
    torch.testing.assert_close(model(IDS).logits, logits)
    assert_equal(per_example_grads(model)(trainable(model), input_ids=IDS, labels=IDS), expected)


@pytest.mark.parametrize("change", ["hook", "swap", "wrap"])
def test_an_activation_changed_after_patching_is_honoured(change: str) -> None:
    model = llama(lora=False)
    apply_model_patches(model, **KERNELS)
    mlp = model.model.layers[0].mlp
    if change == "swap":
        mlp.act_fn = nn.GELU()
    elif change == "hook":
        mlp.act_fn.register_forward_hook(lambda module, args, output: output * 2)
    else:
        act = mlp.act_fn.forward
        mlp.act_fn.forward = lambda x: act(x) + 1
    expected = mlp.down_proj(mlp.act_fn(mlp.gate_proj(torch.ones(1, 32))) * mlp.up_proj(torch.ones(1, 32)))
    torch.testing.assert_close(mlp(torch.ones(1, 32)), expected)
    report = patch_report(model)
    assert report is not None
    assert "activation was changed" in report.fallbacks[0].reason


def test_a_head_wrapped_after_patching_sees_tensors() -> None:
    model = llama()
    apply_model_patches(model)
    head, seen = model.base_model.model.lm_head, []
    stock = head.forward

    def watched(x: torch.Tensor) -> torch.Tensor:
        out = stock(x)
        seen.append(type(out).__name__)
        return out

    head.forward = watched
    per_example_grads(model)(trainable(model), input_ids=IDS, labels=IDS)
    assert set(seen) == {"Tensor"}


def test_autocast_around_the_whole() -> None:
    model = llama(lora=False)
    with torch.autocast("cpu", torch.bfloat16):
        expected = loop(model)
    apply_model_patches(model)
    with torch.autocast("cpu", torch.bfloat16):
        found = per_example_grads(model)(trainable(model), input_ids=IDS, labels=IDS)
    for name, e in expected.items():
        assert float((found[name] - e).norm() / e.norm()) < 3e-2, name


def test_num_items_in_batch_is_noted_inside_transforms() -> None:
    model = llama(lora=False)
    apply_model_patches(model)
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(p: dict, ids: torch.Tensor) -> torch.Tensor:
        return functional_call(model, p, (), {"input_ids": ids, "labels": ids, "num_items_in_batch": 99}).loss

    vmap(grad(loss), (None, 0))(params, IDS)
    report = patch_report(model)
    assert report is not None
    assert any("num_items_in_batch" in f.reason for f in report.fallbacks)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_targets_and_rows_that_cannot_be_meant() -> None:
    model = llama()
    apply_model_patches(model)
    params = trainable(model)
    with pytest.raises(OptionTypeError, match="the class LlamaForCausalLM"):
        per_example_grads(LlamaForCausalLM)
    with pytest.raises(InputError, match=r"torch.compile"):
        per_example_grads(torch.compile(model))
    with pytest.raises(InputError, match=r"input_ids has shape \(6,\).*unsqueeze\(0\)"):
        per_example_grads(model)(params, input_ids=IDS[0], labels=IDS[0])
    with pytest.raises(InputError, match=r"1 for rows and 0 for padding rows, got \[0.5"):
        clipped_grad(model, clip_norm=1.0)(params, input_ids=IDS, labels=IDS, row_weight=torch.tensor([0.5, 1.0, 0.0]))
    with pytest.raises(OptionTypeError, match="strict='yes'"):
        apply_model_patches(model, strict="yes")


def test_hooks_by_which_transformers_records_outputs_cost_no_engine() -> None:
    model = llama()
    expected = loop(model)
    apply_model_patches(model)
    params = trainable(model)
    states = per_example_grads(model, has_aux=True)(
        params, input_ids=IDS, labels=IDS, output_hidden_states=True, output_attentions=True
    )[1]["hidden_states"]
    assert [s.shape for s in states] == [(3, 6, 32)] * 3
    assert any(module._forward_hooks for module in model.modules()), "they stay"
    assert_equal(per_example_grads(model, engine="batched")(params, input_ids=IDS, labels=IDS), expected)


@pytest.mark.parametrize("engine", ["vmap", "batched"])
def test_threads_take_turns_at_one_model(engine: str) -> None:
    model = llama()
    expected = {name: g.sum(0) for name, g in loop(model).items()}
    apply_model_patches(model)
    own, params, running = dict(model.named_parameters()), trainable(model), threading.Lock()

    def overlap() -> None:
        assert running.acquire(blocking=False), "two steps at a time"
        time.sleep(0.02)
        running.release()

    # a hook would cost the batched engine
    norm = type(model.base_model.model.model.norm)
    stock = norm.forward

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        overlap()
        return stock(self, x)

    step = clipped_grad(model, clip_norm=1e9, engine=engine)
    norm.forward = forward
    try:
        # the PEFT model and the one inside are one model
        inner = model.base_model.model
        prefix = "base_model.model."
        other = clipped_grad(inner, clip_norm=1e9, engine=engine)
        bare = {name.removeprefix(prefix): p for name, p in params.items()}
        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(step, params, input_ids=IDS, labels=IDS) for _ in range(4)]
            more = [pool.submit(other, bare, input_ids=IDS, labels=IDS) for _ in range(2)]
        found = [job.result().grads for job in jobs]
        found += [{prefix + name: g for name, g in job.result().grads.items()} for job in more]
    finally:
        norm.forward = stock
    for grads in found:
        assert_equal(grads, expected)
    now = dict(model.named_parameters())
    assert all(now[name] is p for name, p in own.items())
