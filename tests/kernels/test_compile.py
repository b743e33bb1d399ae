"""torch.compile around an op: same values and gradients, a bounded number of graphs, transforms in compiled code."""

import pytest
import torch
from torch.func import grad, vmap

from opake_kernels import (
    opake_cross_entropy_loss,
    opake_fused_add_rms_norm,
    opake_rms_norm,
    opake_rope_qk,
    opake_swiglu,
)

pytestmark = [
    # the compiler's own look at the leaves of a graph
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script.*is deprecated:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def _graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_forward_and_backward_over_twenty_lengths(device):
    weight = torch.randn(8, 6, device=device)

    def loss(x):
        return (opake_swiglu(x @ weight, torch.sin(x @ weight)) * 2).sum()

    compiled, seen = torch.compile(loss, backend="aot_eager"), []
    for T in range(2, 22):
        x = torch.randn(T, 8, device=device, requires_grad=True)
        results = [(y := f(x), *torch.autograd.grad(y, x)) for f in (compiled, loss)]
        torch.testing.assert_close(*results)
        seen.append(_graphs())
    # three regions (before, after, the checks of the op), each once for its first length and once for any length
    assert seen[-1] <= 6
    assert seen[2] == seen[-1]


def test_cross_entropy_inside_a_compiled_function(device):
    def loss(x, y):
        return opake_cross_entropy_loss(torch.sin(x), y) * 2

    x, y = torch.randn(3, 9, device=device, requires_grad=True), torch.tensor([1, 2, -100], device=device)
    results = [(v := f(x, y), *torch.autograd.grad(v, x)) for f in (torch.compile(loss, backend="aot_eager"), loss)]
    torch.testing.assert_close(*results)


def test_transforms_inside_a_compiled_function(device):
    per_example = vmap(grad(lambda x, y: opake_cross_entropy_loss(torch.sin(x), y)))
    x, y = torch.randn(2, 3, 9, device=device), torch.randint(0, 9, (2, 3), device=device)
    compiled = torch.compile(lambda x, y: per_example(x, y) * 2, backend="aot_eager")
    torch.testing.assert_close(compiled(x, y), per_example(x, y) * 2)


def test_norms_and_rope_over_lengths(device):
    weight = torch.randn(8, device=device, requires_grad=True)

    def loss(x, table):
        norm, total = opake_fused_add_rms_norm(opake_rms_norm(x * 2, weight), x, weight)
        heads = torch.sin(norm).unflatten(-1, (2, 4)).transpose(1, 2)
        q, k = opake_rope_qk(heads, heads[:, :1], table, table)
        return q.sin().sum() + k.cos().sum() + total.sum()

    compiled, seen = torch.compile(loss, backend="aot_eager"), []
    for T in range(2, 6):
        x = torch.randn(2, T, 8, device=device, requires_grad=True)
        table = torch.randn(T, 4, device=device)
        results = [(y := f(x, table), *torch.autograd.grad(y, (x, weight))) for f in (compiled, loss)]
        torch.testing.assert_close(*results)
        seen.append(_graphs())
    # no length after the second brings a new graph
    assert seen[1] == seen[-1]
