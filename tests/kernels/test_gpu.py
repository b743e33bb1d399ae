"""What only a GPU can show: more than 2^31 elements, a device that is not the current one, large shapes, capture."""

import pytest
import torch
from torch.func import vjp, vmap

from opake_kernels import (
    opake_cross_entropy_loss,
    opake_fused_add_rms_norm,
    opake_gated_activation,
    opake_linear_cross_entropy_loss,
    opake_rms_norm,
    opake_rope_qk,
    opake_selective_log_softmax,
    opake_swiglu,
)
from opake_kernels.add_rms_norm import fused_add_rms_norm_reference
from opake_kernels.cross_entropy import CrossEntropySettings, cross_entropy_reference
from opake_kernels.gated import gated_reference
from opake_kernels.linear_cross_entropy import linear_cross_entropy_reference
from opake_kernels.rms_norm import rms_norm_reference
from opake_kernels.rope import rope_qk_reference
from opake_kernels.selective_log_softmax import selective_log_softmax_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BF16 = torch.bfloat16


def _judge(assert_errors, op, twin, args, diff, rows):
    """Gradients of the whole, judged on the slices `rows` of the first dimension."""
    leaves = [a.requires_grad_() if i in diff else a for i, a in enumerate(args)]
    out = op(*leaves)
    ct = torch.randn_like(out)
    grads = torch.autograd.grad(out, [leaves[i] for i in diff], ct)
    for at in rows:
        part = [a.detach()[at].clone().requires_grad_() if i in diff else a[at] for i, a in enumerate(args)]
        results = [[t[at] for t in (out.detach(), *grads)]]
        for dtype in (None, torch.float64):
            cut = [p.detach().to(dtype).requires_grad_() if dtype and i in diff else p for i, p in enumerate(part)]
            y = twin(*cut)
            results.append([y.detach(), *torch.autograd.grad(y, [cut[i] for i in diff], ct[at].to(y.dtype))])
        assert_errors(*results)


def test_gated_beyond_int32(assert_errors):
    # 2^31 + 2^24 elements in each operand
    R, I = 2**17 + 2**10, 2**14
    args = [torch.randn(R, I, device="cuda", dtype=BF16) for _ in range(2)]
    _judge(assert_errors, opake_swiglu, gated_reference, args, (0, 1), [slice(0, 3), slice(R - 3, R)])


@pytest.mark.parametrize("interleaved", [False, True])
def test_combined_gate_up_beyond_int32(interleaved, assert_errors):
    R, I = 2**17 + 2**10, 2**14
    x = torch.randn(R, I, device="cuda", dtype=BF16)
    op = lambda t: opake_gated_activation(t, interleaved=interleaved)  # noqa: E731
    twin = lambda t: gated_reference(t, interleaved=interleaved)  # noqa: E731
    _judge(assert_errors, op, twin, [x], (0,), [slice(0, 3), slice(R - 3, R)])


@pytest.mark.parametrize("V", [262144, 262143])
def test_cross_entropy_beyond_int32(V, assert_errors):
    R = 2**13 + 2**4
    logits = torch.randn(R, V, device="cuda", dtype=BF16)
    labels = torch.randint(0, V, (R,), device="cuda")
    labels[-2] = -100
    settings = CrossEntropySettings(reduction="none")
    op = lambda x, y: opake_cross_entropy_loss(x, y, reduction="none")  # noqa: E731
    twin = lambda x, y: cross_entropy_reference(x, y, settings)  # noqa: E731
    _judge(assert_errors, op, twin, [logits, labels], (0,), [slice(0, 3), slice(R - 3, R)])


def test_selective_log_softmax_beyond_int32(assert_errors):
    R, V = 2**13 + 2**4, 262144
    logits, indices = torch.randn(R, V, device="cuda", dtype=BF16), torch.randint(0, V, (R, 2), device="cuda")
    rows = [slice(0, 3), slice(R - 3, R)]
    _judge(assert_errors, opake_selective_log_softmax, selective_log_softmax_reference, [logits, indices], (0,), rows)


def test_a_head_beyond_int32():
    # 2^31 + 2^24 weights; hidden states by which every class but a few at the ends has a logit of 0
    V, H = 2**19 + 2**12, 2**12
    weight = torch.zeros(V, H, device="cuda", dtype=BF16)
    weight[:3], weight[-3:] = 0.01, 0.02
    hidden = torch.rand(4, H, device="cuda", dtype=BF16).requires_grad_()
    labels = torch.tensor([0, V - 1, V - 1, 5], device="cuda")
    loss = opake_linear_cross_entropy_loss(hidden, weight, labels)
    (d,) = torch.autograd.grad(loss, hidden)
    x = hidden.detach().double().requires_grad_()
    first, last = x.sum(1) * weight[0, 0].double(), x.sum(1) * weight[-1, 0].double()
    rest = torch.full_like(first, torch.log(torch.tensor(float(V - 6))).item())
    lse = torch.logsumexp(torch.stack([first] * 3 + [last] * 3 + [rest]), 0)
    want = (lse - torch.stack([first[0], last[1], last[2], 0 * first[3]])).mean()
    torch.testing.assert_close(loss.double(), want, rtol=2**-8, atol=0)
    torch.testing.assert_close(d.double(), torch.autograd.grad(want, x)[0], rtol=2**-6, atol=2**-12)


@pytest.mark.parametrize("V", [50257, 128256, 151936, 256000, 65537])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_cross_entropy_vocabularies(V, dtype, device, check_op):
    logits = (torch.randn(2, 6, V, device=device) * 2).to(dtype)
    labels = torch.randint(0, V, (2, 6), device=device)
    labels[0, 2] = -100
    check_op(opake_cross_entropy_loss, cross_entropy_reference, [logits, labels], (0,))


@pytest.mark.parametrize("V", [50257, 128256])
def test_selective_log_softmax_vocabularies(V, device):
    logits = torch.randn(4, V, device=device, requires_grad=True)
    indices = torch.randint(0, V, (4, 2), device=device)
    results = []
    for fn in (opake_selective_log_softmax, lambda x, i: torch.log_softmax(x.double(), -1).gather(-1, i).float()):
        chosen = fn(logits, indices)
        results.append((chosen.detach(), *torch.autograd.grad(chosen.sum(), logits)))
    torch.testing.assert_close(*results, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("shape", [(2, 128, 512), (5, 123, 123), (4, 11009), (3, 14337), (4, 16384)])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_gated_shapes(shape, dtype, device, check_op):
    args = [torch.randn(shape, device=device).to(dtype) for _ in range(2)]
    check_op(opake_swiglu, gated_reference, args, (0, 1))


def _far(*shape, dtype=BF16):
    return torch.randn(shape, device="cuda:1", dtype=dtype)


def _classes(*shape):
    return torch.randint(0, 64, shape, device="cuda:1")


# op, twin, arguments on a second device, positions to differentiate
ELSEWHERE = {
    "gated": (opake_swiglu, gated_reference, lambda: [_far(3, 64), _far(3, 64)], (0, 1)),
    "combined": (opake_swiglu, gated_reference, lambda: [_far(3, 64)], (0,)),
    "rms_norm": (opake_rms_norm, rms_norm_reference, lambda: [_far(4, 5, 96), _far(96)], (0, 1)),
    "wide rms_norm": (opake_rms_norm, rms_norm_reference, lambda: [_far(4, 16400), _far(16400)], (0, 1)),
    "add": (
        opake_fused_add_rms_norm,
        fused_add_rms_norm_reference,
        lambda: [_far(4, 96), _far(4, 96), _far(96)],
        (0, 1, 2),
    ),
    "rope": (
        opake_rope_qk,
        rope_qk_reference,
        lambda: [_far(2, 4, 3, 16), _far(2, 2, 3, 16), _far(2, 3, 16), _far(2, 3, 16)],
        (0, 1),
    ),
    "cross_entropy": (opake_cross_entropy_loss, cross_entropy_reference, lambda: [_far(5, 64), _classes(5)], (0,)),
    "selective": (
        opake_selective_log_softmax,
        selective_log_softmax_reference,
        lambda: [_far(5, 64, dtype=torch.float32), _classes(5, 2)],
        (0,),
    ),
    "linear": (
        opake_linear_cross_entropy_loss,
        linear_cross_entropy_reference,
        lambda: [_far(40, 32), _far(64, 32), _classes(40)],
        (0, 1),
    ),
}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", ELSEWHERE)
def test_tensors_on_another_device_than_the_current_one(name, check_op):
    op, twin, arguments, diff = ELSEWHERE[name]
    assert torch.cuda.current_device() == 0
    got = check_op(op, twin, arguments(), diff, rms=True)
    assert {t.device.index for t in got} == {1}
    assert torch.cuda.current_device() == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_in_one_call():
    with pytest.raises(ValueError, match="cuda:0 and cuda:1"):
        opake_swiglu(torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1"))


def test_per_example_step_in_a_cuda_graph():
    logits, labels = torch.randn(4, 8, 1000, device="cuda", dtype=BF16), torch.randint(0, 1000, (4, 8), device="cuda")

    def one(x, y):
        loss, back = vjp(lambda x: opake_cross_entropy_loss(opake_swiglu(x, x), y), x)
        return back(torch.ones_like(loss), retain_graph=False, create_graph=False)[0]

    step = vmap(one)
    eager = step(logits, labels)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(logits, labels)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = step(logits, labels)
    logits.copy_(torch.randn_like(logits))
    graph.replay()
    torch.testing.assert_close(held, step(logits, labels), rtol=0, atol=0)
    assert not torch.equal(held, eager)


def test_triton_cache_does_not_grow_with_sequence_length():
    from opake_kernels import cross_entropy

    kernels = [getattr(cross_entropy, f"cross_entropy_{part}_kernel") for part in ("fwd", "bwd", "reduce")]

    def entries():
        return [len(k.device_caches[torch.cuda.current_device()][0]) for k in kernels]

    sizes = []
    for T in range(17, 37):
        logits = torch.randn(T, 1024, device="cuda", dtype=BF16, requires_grad=True)
        opake_cross_entropy_loss(logits, torch.zeros(T, dtype=torch.int64, device="cuda")).backward()
        sizes.append(entries())
    assert sizes[0] == sizes[-1]
