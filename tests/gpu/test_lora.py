"""A PEFT model on CUDA with every fusion on: both engines against a loop in float64, replayed steps, wide sizes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from opake.functional import per_example_grads
from opake.patches import apply_model_patches, patch_report
from opake_kernels.lora import lora_mlp, lora_mlp_reference, opake_lora_mlp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def build(rank: int) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).double()
    model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model.double().cuda()


def lowered(model: Any) -> Any:
    """A bf16 base with fp32 adapters, as PEFT makes it."""
    low = copy.deepcopy(model).bfloat16()
    for (name, parameter), exact in zip(low.named_parameters(), model.parameters(), strict=True):
        if "lora_" in name:
            parameter.data = exact.data.float()
    return low


def loop(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = [
        torch.autograd.grad(model(input_ids=row[None], labels=row[None]).loss, list(params.values())) for row in ids
    ]
    return {name: torch.stack(grads).double() for name, grads in zip(params, zip(*found, strict=True), strict=True)}


def error(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    return max(float((found[n].double() - e).norm() / e.norm()) for n, e in exact.items())


@pytest.mark.parametrize("engine", ["vmap", "batched"])
@pytest.mark.parametrize("rank", [16, 40, 80])
def test_engines_equal_a_loop(rank: int, engine: str) -> None:
    ids = torch.randint(0, 512, (4, 96), generator=torch.Generator().manual_seed(1)).cuda()
    model = build(rank)
    low = lowered(model)
    exact, stock = loop(model, ids), loop(low, ids)
    report = apply_model_patches(low)
    assert len(report.find(flag="lora_mlp", state="applied")) == 2
    params = {name: p for name, p in low.named_parameters() if p.requires_grad}
    found = per_example_grads(low, engine=engine)(params, input_ids=ids, labels=ids)
    assert {g.dtype for g in found.values()} == {torch.float32}
    assert error(found, exact) <= 2 * error(stock, exact)
    again = patch_report(low)
    assert again is not None
    assert again.fallbacks == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("I", "T"), [(1408, 256), (1000, 200), (4864, 700)])
@pytest.mark.parametrize("parts", [1, 3])
def test_wide_mlp_in_parts(parts: int, I: int, T: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_mlp, "PARTS", parts)
    monkeypatch.setattr(lora_mlp, "PART", 1)
    torch.manual_seed(0)
    H, B, r = 512, 4, 16
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.float64)  # noqa: E731
    X, W = make(B, T, H), [make(I, H) / H**0.5, make(I, H) / H**0.5, make(H, I) / I**0.5]
    factors = [t for n, o in ((H, I), (H, I), (I, H)) for t in (make(n, r) / n**0.5, make(r, o) / r**0.5)]
    ct = make(B, T, H)

    def gradients(op: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [X.to(dtype), *(f.to(dtype).expand(B, *f.shape) for f in factors)]
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        x, *f = leaves
        Ws = [w.to(dtype) for w in W]
        y = op(x, Ws[0], f[0], f[1], 2.0, Ws[1], f[2], f[3], 2.0, Ws[2], f[4], f[5], 2.0)
        return [y.detach(), *torch.autograd.grad(y, leaves, ct.to(dtype))]

    exact, stock = gradients(lora_mlp_reference, torch.float64), gradients(lora_mlp_reference, dtype)
    for mine, theirs, e in zip(gradients(opake_lora_mlp, dtype), stock, exact, strict=True):
        ours, torchs = (float((t.double() - e).norm() / e.norm()) for t in (mine, theirs))
        assert ours <= 2 * torchs, (ours, torchs)


def test_a_captured_step_replays() -> None:
    model = lowered(build(16))
    apply_model_patches(model)
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    step = per_example_grads(model, engine="batched")
    ids = torch.randint(0, 512, (4, 64), device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(params, input_ids=ids, labels=ids)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(params, input_ids=ids, labels=ids)
    ids.copy_(torch.randint(0, 512, (4, 64), device="cuda"))
    graph.replay()
    for name, gradient in step(params, input_ids=ids, labels=ids).items():
        torch.testing.assert_close(captured[name], gradient)
