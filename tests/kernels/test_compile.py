"""torch.compile around an op: one graph with the op in it, same values and gradients, transforms in compiled code."""

import pytest
import torch
from torch.func import grad, vmap

from opake_kernels import (
    opake_cross_entropy_loss,
    opake_fused_add_rms_norm,
    opake_gated_activation,
    opake_linear_cross_entropy_loss,
    opake_relu_squared,
    opake_rms_norm,
    opake_rope,
    opake_rope_qk,
    opake_selective_log_softmax,
    opake_swiglu,
)

pytestmark = [
    # the compiler's own look at the leaves of a graph
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script.*is deprecated"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def _graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _heads(x):
    return torch.sin(x).unflatten(-1, (2, 4)).transpose(1, 2)


def _labels(x):
    return torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1) % 8


def _table(x):
    return torch.arange(x.shape[1] * 4.0, device=x.device).view(-1, 4)


# each takes x (B, T, 8) and a weight (8)
OPS = {
    "swiglu": lambda x, w: opake_swiglu(x @ torch.diag(w), torch.sin(x)),
    "combined": lambda x, w: opake_gated_activation(x * w, activation="gpt_oss", interleaved=True),
    "relu2": lambda x, w: opake_relu_squared(x * w),
    "rms_norm": lambda x, w: opake_rms_norm(x * 2, w),
    "rms_norm_frozen": lambda x, w: opake_rms_norm((x * w).bfloat16(), None).float(),
    "add_rms_norm": lambda x, w: torch.stack(opake_fused_add_rms_norm(x * 2, x.sin(), w)),
    "the_sum_alone": lambda x, w: opake_fused_add_rms_norm(x * w, x.sin(), w.detach())[1],
    "rope": lambda x, w: opake_rope(_heads(x * w), _table(x).cos(), _table(x).sin()),
    "rope_qk": lambda x, w: torch.cat(opake_rope_qk(_heads(x), _heads(x * w)[:, :1], _table(x), _table(x)), 1),
    "cross_entropy": lambda x, w: opake_cross_entropy_loss(x * w, _labels(x), label_smoothing=0.1),
    "losses": lambda x, w: opake_cross_entropy_loss(x * w, _labels(x), reduction="none", logit_softcapping=3.0),
    "selective": lambda x, w: opake_selective_log_softmax(x * w, _labels(x)),
    "linear": lambda x, w: opake_linear_cross_entropy_loss(x.sin(), torch.diag(w), _labels(x)),
    "linear_frozen": lambda x, w: opake_linear_cross_entropy_loss(x * w, torch.eye(8, device=x.device), _labels(x)),
    "linear_by_token": lambda x, w: opake_linear_cross_entropy_loss(
        x, torch.diag(w), _labels(x), bias=w, reduction="none"
    ),
}


@pytest.mark.parametrize("name", OPS)
def test_one_graph_around_an_op_for_every_length(name, device):
    """Forward and backward: a graph for the first length, and one for any length."""
    loss = lambda x, w: (OPS[name](x, w) * 2).sin().sum()  # noqa: E731
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    weight = torch.linspace(0.5, 1.5, 8, device=device).requires_grad_()
    # kernels without loops are quick enough in the interpreter for twenty
    for T in range(2, 22) if name in ("swiglu", "rms_norm", "add_rms_norm") else (2, 3, 4, 7):
        x = torch.randn(2, T, 8, device=device, requires_grad=True)
        results = [(y := f(x, weight), *torch.autograd.grad(y, (x, weight))) for f in (compiled, loss)]
        torch.testing.assert_close(*results)
    assert _graphs() <= 2
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, weight), loss(x, weight))


def test_layouts_and_group_axis_in_compiled_code(device):
    x, weight = torch.randn(5, 2, 8, device=device).transpose(0, 1), torch.randn(2, 8, device=device)
    leaves = [x.detach().requires_grad_(), weight.requires_grad_()]
    loss = lambda x, w: opake_rms_norm(x, w).square().sum()  # noqa: E731
    results = [torch.autograd.grad(f(*leaves), leaves) for f in (torch.compile(loss, backend="aot_eager"), loss)]
    torch.testing.assert_close(*results)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_inductor_over_twenty_lengths_keeps_the_number_of_compiled_kernels():
    from opake_kernels import cross_entropy_kernels, gated_kernels, rms_kernels

    kernels = [
        kernel
        for module in (cross_entropy_kernels, gated_kernels, rms_kernels)
        for kernel in vars(module).values()
        if hasattr(kernel, "device_caches")
    ]

    def loss(x, w):
        return opake_cross_entropy_loss(opake_swiglu(opake_rms_norm(x * 2, w), x.sin()), x[..., 0].long() * 0)

    compiled, seen = torch.compile(loss), []
    weight = torch.randn(256, device="cuda", requires_grad=True)
    for T in range(16, 36):
        x = torch.randn(2, T, 256, device="cuda", requires_grad=True)
        results = [(y := f(x, weight), *torch.autograd.grad(y, (x, weight))) for f in (compiled, loss)]
        torch.testing.assert_close(*results)
        seen.append(sum(len(k.device_caches[torch.cuda.current_device()][0]) for k in kernels))
    assert _graphs() <= 2
    # the first three lengths bring the three tiles that a gated activation has; after them there is nothing new
    assert seen[2] == seen[-1], seen


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
