"""The loss-only head on CUDA: fused in bf16, captured per example, and as small in memory as it claims."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.func import vjp, vmap

from opake.bench.measure import peak_gib
from opake.checking.tiny import tiny_batch, tiny_model
from opake.patches import apply_model_patches
from opake_kernels.cross_entropy import CrossEntropySettings
from opake_kernels.linear_cross_entropy import linear_cross_entropy_reference, opake_linear_cross_entropy_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "cohere", "granite", "qwen2"])
def test_loss_only_in_bfloat16(model_type):
    model = tiny_model(model_type).to("cuda", torch.bfloat16)
    batch = {name: value.cuda() for name, value in tiny_batch().items()}
    want = model(**batch).loss
    apply_model_patches(model)
    out = model(**batch, loss_only=True)
    assert out.logits is None
    torch.testing.assert_close(out.loss, want, rtol=2e-2, atol=0)


def _losses_and_gradient(loss, hidden, weight, labels, dtype, part):
    """Token losses (N,), and the gradient (N, H) of their mean, `part` tokens a call, in float64."""
    found, w = [], weight.to(dtype)
    for at in range(0, len(labels), part):
        x = hidden[at : at + part].to(dtype).requires_grad_()
        tokens = loss(x, w, labels[at : at + part])
        (d,) = torch.autograd.grad(tokens.sum() / len(labels), x)
        found.append((tokens.detach().double(), d.double()))
    return [torch.cat(t) for t in zip(*found, strict=True)]


@pytest.mark.parametrize(("tokens", "part"), [(16, 1), (4096, 4096), (32768, 32768)])
@pytest.mark.parametrize("V", [50257, 262144])
@pytest.mark.parametrize("size", [0.01, 1.0, 4.0])
def test_accuracy(size, V, tokens, part):
    """Flat and confident logits: the error against float64 is at most twice that of torch's unfused bf16 path.

    One token is judged over sixteen calls: the error of a single loss is luck on either side.
    """
    torch.manual_seed(0)
    H, none = 128, CrossEntropySettings(reduction="none")
    weight = (torch.randn(V, H, device="cuda") / H**0.5).bfloat16()
    labels = torch.randint(0, V, (tokens,), device="cuda")
    hidden = (torch.randn(tokens, H, device="cuda") * size + weight[labels].float() * size).bfloat16()
    args, twin = (hidden, weight, labels), partial(linear_cross_entropy_reference, settings=none)
    exact = _losses_and_gradient(twin, *args, torch.float64, 2048)
    stock = _losses_and_gradient(twin, *args, torch.bfloat16, min(part, 2048))
    ours = partial(opake_linear_cross_entropy_loss, reduction="none")
    for o, s, e in zip(_losses_and_gradient(ours, *args, torch.bfloat16, part), stock, exact, strict=True):
        assert (o - e).norm() <= 2 * (s - e).norm() + torch.finfo(torch.float32).eps / 2 * e.norm()


@pytest.mark.parametrize("per_example", [False, True])
def test_memory_of_a_frozen_head(per_example):
    B, T, H, V = 8, 1024, 4096, 128256
    weight = torch.randn(V, H, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(B, T, H, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, V, (B, T), device="cuda")

    def one(x, y):
        value, pull = vjp(lambda x: opake_linear_cross_entropy_loss(x, weight, y), x)
        return pull(torch.ones_like(value), retain_graph=False, create_graph=False)[0]

    def step():
        if per_example:
            return vmap(one)(hidden, labels)
        x = hidden.detach().requires_grad_()
        return torch.autograd.grad(opake_linear_cross_entropy_loss(x, weight, labels), x)[0]

    assert peak_gib(step) <= 0.5


def test_captured_in_a_graph():
    weight = torch.randn(1024, 64, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(4, 32, 64, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, 1024, (4, 32), device="cuda")
    step = vmap(
        lambda x, y: vjp(lambda x: opake_linear_cross_entropy_loss(x, weight, y), x)[1](
            torch.ones((), device="cuda"), retain_graph=False, create_graph=False
        )[0]
    )
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(hidden, labels)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(hidden, labels)
    hidden.normal_()
    graph.replay()
    torch.testing.assert_close(captured, step(hidden, labels))
