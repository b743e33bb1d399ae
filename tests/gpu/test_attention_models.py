"""Models whose attention takes our own kernel, or a window without a mask, on CUDA: gradients against a loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from opake.checking.tiny import tiny_config
from opake.checkpoint import selective_checkpointing
from opake.functional import clipped_grad, per_example_grads
from opake.patches import apply_model_patches, patch_report
from opake_kernels.attention import tiled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 64,
    "sliding_window": 20,
    "max_position_embeddings": 256,
}
CASES = {
    "gemma2": ("eager", {"attn_logit_softcapping": 5.0}),
    # as many experts as choices: a near tie that a rounding decides says nothing of attention
    "gpt_oss": ("eager", {"num_local_experts": 2, "num_experts_per_tok": 2}),
    "mistral": ("sdpa", {}),
    "ministral": ("sdpa", {}),
}


def build(name: str, dtype: torch.dtype, lora: bool = False) -> Any:
    attention, options = CASES[name]
    torch.manual_seed(0)
    config = tiny_config(name, **SIZES, **options)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    if lora:
        names = ["q_proj", "k_proj", "v_proj", "o_proj"]
        model = get_peft_model(model, LoraConfig(r=8, target_modules=names, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.to("cuda", dtype).train()


def rows(padding: str, T: int = 72) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 90, (3, T), generator=torch.Generator().manual_seed(1)).cuda()
    batch = {"input_ids": ids, "labels": ids.clone()}
    if padding == "left":
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][1, :30] = 0
        batch["labels"][1, :31] = -100
    return batch


def loop(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = []
    for i in range(3):
        loss = model(**{name: value[i : i + 1] for name, value in batch.items()}, use_cache=False).loss
        found.append(torch.autograd.grad(loss, list(params.values()), allow_unused=True))
    columns = zip(params, zip(*found, strict=True), strict=True)
    return {name: torch.stack(grads).double() for name, grads in columns if all(g is not None for g in grads)}


def error(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    scale = max(float(e.norm()) for e in exact.values())
    return max(float((found[n].double() - e).norm() / max(float(e.norm()), 1e-3 * scale)) for n, e in exact.items())


@pytest.mark.parametrize("way", ["vmap", "batched", "batched, remat", "vmap, remat", "batched, remat mlp"])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_a_loop(name: str, padding: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, lora, batch = way.partition(",")[0], way.startswith("batched"), rows(padding)
    # eager masks of float64 are beyond the float32 of stock softmax
    wide = torch.float64 if CASES[name][0] == "sdpa" else torch.float32
    exact = loop(build(name, wide, lora), batch)
    calls: list[int] = []
    stock_pair = tiled._pair
    monkeypatch.setattr(tiled, "_pair", lambda *a: (calls.append(1), stock_pair(*a))[1])
    for dtype, slack in ((torch.float32, 5e-5), (torch.bfloat16, 0.0)):
        calls.clear()
        model = build(name, dtype, lora)
        stock = error(loop(model, batch), exact)
        apply_model_patches(model)
        if "remat" in way:
            selective_checkpointing(model, part="mlp" if way.endswith("mlp") else "layer")
        params = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
        got = per_example_grads(model, engine=engine)(params, **batch)
        assert error(got, exact) <= 2 * stock + slack, (dtype, error(got, exact), stock)
        report = patch_report(model)
        assert report is not None
        assert not [f for f in report.fallbacks if "attention" in f.reason], report.fallbacks
        ours = CASES[name][0] == "eager" or (dtype == torch.float32 and padding == "none")
        assert bool(calls) == ours, (dtype, calls)


def test_captured_steps_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("gemma2", torch.bfloat16, lora=True)
    apply_model_patches(model)
    params = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    eager, captured = (clipped_grad(model, clip_norm=1.0, engine="batched", capture=c) for c in (False, True))
    for seed in (1, 2, 3):
        ids = torch.randint(3, 90, (3, 64), generator=torch.Generator().manual_seed(seed)).cuda()
        a, b = (f(params, input_ids=ids, labels=ids) for f in (eager, captured))
        for name in a.grads:
            torch.testing.assert_close(a.grads[name], b.grads[name], rtol=1e-2, atol=1e-3)
