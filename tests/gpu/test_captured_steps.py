"""Training by captured steps: equal to eager ones through changes of inputs, rates and adapters, at constant memory."""

from __future__ import annotations

import gc

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config

from opake.checkpoint import selective_checkpointing
from opake.functional import clipped_grad
from opake.patches import apply_model_patches, apply_runtime_patches, restore, restore_runtime
from opake.testing.oracle import relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
B, T, V = 4, 32, 131


@pytest.fixture
def make():
    """Models with the same weights and two adapters, patched; taken back at the end."""
    made = []

    def model(dtype=torch.float32, window=None):
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=V,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
            use_sliding_window=window is not None,
            sliding_window=window,
            max_window_layers=1,
        )
        base = AutoModelForCausalLM.from_config(config, dtype=dtype).cuda()
        lora = LoraConfig(r=4, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(base, lora)
        model.add_adapter("second", lora)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.normal_(std=0.05)
        apply_runtime_patches()
        apply_model_patches(model)
        made.append(model)
        return model.train()

    yield model
    for each in made:
        restore(each)
    restore_runtime()


def batch(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(step)).cuda()
    labels = ids.clone()
    labels[step % B, T // 2 :] = -100
    return {"input_ids": ids, "labels": labels}


def trainable(model, adapter: str) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if f".{adapter}." in name}


@pytest.mark.parametrize("engine", ["batched", "vmap"])
def test_200_steps_equal_eager_ones(make, engine):
    models = {capture: make() for capture in (True, False)}
    run = {c: clipped_grad(m, clip_norm=0.5, engine=engine, capture=c) for c, m in models.items()}
    reasons = []
    for step in range(200):
        adapter = "default" if step < 120 else "second"
        rate = 0.05 / (1 + step % 7)
        for capture, model in models.items():
            if step == 120:
                model.set_adapter("second")
            params = trainable(model, adapter)
            out = run[capture](params, **batch(step))
            for name, p in params.items():
                p.sub_(rate * out.grads[name])
            if capture:
                reasons.append(out.reason)
    assert sum("captured in a CUDA graph" in reason for reason in reasons) == 198, set(reasons)
    for adapter in ("default", "second"):
        got, want = (trainable(models[c], adapter) for c in (True, False))
        assert relative_error(got, want) < 2e-5
        assert any((got[name] != p).any() for name, p in trainable(make(), adapter).items())


@pytest.mark.parametrize("engine", ["batched", "vmap"])
@pytest.mark.parametrize("part", ["mlp", "layer"])
def test_a_policy_is_followed_by_graphs(make, engine, part):
    """Put in force and taken back between replays; a change is a new capture."""
    model = make()
    params = trainable(model, "default")
    eager, captured = (clipped_grad(model, clip_norm=0.5, engine=engine, capture=c) for c in (False, True))
    graphs = []
    for step in range(6):
        if step == 2:
            policy = selective_checkpointing(model, part=part)
        if step == 4:
            policy.undo()
        want, got = eager(params, **batch(step)), captured(params, **batch(step))
        graphs.append("captured in a CUDA graph" in got.reason)
        assert relative_error(got.grads, want.grads) < 2e-5
    # what a model held before it is known again
    assert graphs == [False, True, False, True, True, True]


@pytest.mark.parametrize("engine", ["batched", "vmap"])
def test_memory_stays_where_it_is(make, engine):
    model = make(torch.bfloat16)
    params, run = trainable(model, "default"), clipped_grad(model, clip_norm=0.5, engine=engine, capture=True)
    seen = {}
    for step in range(1, 1001):
        run(params, **batch(step % 5))
        if step in (100, 1000):
            # what is in reference cycles goes when the collector runs, sooner or later
            gc.collect()
            torch.cuda.synchronize()
            seen[step] = torch.cuda.memory_allocated()
    assert seen[1000] - seen[100] <= 2**20


def test_graphs_are_bounded_however_many_lengths_come(make):
    from opake.functional.capture import MOST

    model = make(torch.bfloat16)
    params, run = trainable(model, "default"), clipped_grad(model, clip_norm=0.5, capture=True)
    held = []
    for length in [8, 16, 24, 32, 40, 48, 56, 64] * 3:
        ids = torch.randint(0, V, (B, length), device="cuda")
        run(params, input_ids=ids, labels=ids)
        run(params, input_ids=ids, labels=ids)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_reserved())
    assert MOST == 4
    # the pool is shared: the second and third round of lengths need no more than the first
    assert held[-1] <= 1.25 * max(held[:8])


@pytest.mark.parametrize("engine", ["batched", "vmap"])
def test_a_neighbour_does_not_matter_in_a_graph(make, engine):
    model = make()
    params, run = trainable(model, "default"), clipped_grad(model, clip_norm=0.5, engine=engine, capture=True)
    rows = batch(3)
    for _ in range(2):
        first = run(params, **rows).norms.clone()
    other = {**rows, "input_ids": rows["input_ids"].clone(), "labels": rows["labels"].clone()}
    other["input_ids"][1:] = other["input_ids"][1:].flip(1)
    other["labels"][1:] = -100
    assert torch.equal(run(params, **other).norms[0], first[0])


def test_the_public_streams_number_is_the_raw_one():
    from opake_kernels.lora import ahead

    index = torch.cuda.current_device()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert ahead._stream(index) == ahead._public_stream(index) != 0


@pytest.mark.parametrize("engine", ["batched", "vmap"])
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_no_mask_is_made_in_a_capture(make, engine, window, dtype, tolerance, monkeypatch):
    from opake.masks import materialise

    made, real = [], materialise.sdpa_mask
    monkeypatch.setattr(materialise, "sdpa_mask", lambda *a, **k: made.append(real(*a, **k)) or made[-1])
    model = make(dtype, window)
    params = trainable(model, "default")
    eager, captured = (clipped_grad(model, clip_norm=0.5, engine=engine, capture=c) for c in (False, True))
    for step in range(3):
        want, got = eager(params, **batch(step)), captured(params, **batch(step))
    assert "captured" in got.reason
    assert relative_error(got.grads, want.grads) < tolerance
    assert [mask for mask in made if mask is not None] == []
