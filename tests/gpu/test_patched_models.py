"""A patched model on CUDA with every kernel on: gradients against a loop, whole-step memory, row independence."""

from __future__ import annotations

import os

# cuBLAS is deterministic only with a workspace of fixed size, chosen before it starts
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from torch.func import functional_call, grad, vmap
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from opake.functional import per_example_grads
from opake.patches import apply_model_patches, patch_report, restore

SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CASES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 16}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def build(name: str, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    model, config, options = CASES[name]
    model = model(config(**SIZES, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.to("cuda", dtype)


def rows(padding: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 512, (4, 48), generator=torch.Generator().manual_seed(1)).cuda()
    batch = {"input_ids": ids, "labels": ids.clone()}
    if padding != "none":
        mask = torch.ones_like(ids)
        for i, n in enumerate((0, 5, 11, 30)):
            if n:
                mask[i, slice(-n, None) if padding == "right" else slice(0, n)] = 0
        batch["attention_mask"] = mask
        batch["labels"][mask == 0] = -100
    return batch


def loop(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = []
    for i in range(4):
        loss = model(**{name: value[i : i + 1] for name, value in batch.items()}).loss
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    columns = zip(*found, strict=True)
    return {name: torch.stack(g).double() for (name, _), g in zip(model.named_parameters(), columns, strict=True)}


def error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return max(float((found[n].double() - e).norm() / e.norm()) for n, e in expected.items())


@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_a_loop(name: str, padding: str) -> None:
    batch = rows(padding)
    exact = loop(build(name, torch.float64), batch)
    for dtype, slack in ((torch.float32, 1e-5), (torch.bfloat16, 0.0)):
        model = build(name, dtype)
        stock = error(loop(model, batch), exact)
        report = apply_model_patches(model)
        assert report.find(flag="rope", state="applied")
        params = {n: p.detach() for n, p in model.named_parameters()}
        ours = error(per_example_grads(model)(params, **batch), exact)
        assert ours <= 2 * stock + slack, (dtype, ours, stock)
        again = patch_report(model)
        assert again is not None
        assert again.fallbacks == ()
        restore(model)


def test_user_written_transforms_and_plain_training() -> None:
    batch, model = rows("right"), build("llama", torch.float32)
    expected = loop(model, batch)
    stock = model(**batch).loss
    apply_model_patches(model)
    torch.testing.assert_close(model(**batch).loss, stock, rtol=1e-5, atol=1e-5)
    params = {n: p.detach() for n, p in model.named_parameters()}
    found = vmap(grad(lambda p, b: functional_call(model, p, (), b).loss), (None, 0))(params, batch)
    assert error(found, expected) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    model = build("llama", dtype)
    apply_model_patches(model)
    params = {n: p.detach() for n, p in model.named_parameters()}
    torch.use_deterministic_algorithms(True)
    try:
        one, other = rows("right"), rows("right")
        for value in other.values():
            value[1:] = value[1:].flip(1)
        first = per_example_grads(model)(params, **one)
        second = per_example_grads(model)(params, **other)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, gradient in first.items():
        assert torch.equal(gradient[0], second[name][0]), name
