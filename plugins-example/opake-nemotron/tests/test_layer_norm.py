"""The kernel against float64, plain and per example; on a CPU it is the twin unless TRITON_INTERPRET=1."""

import pytest
import torch

from opake_nemotron.layer_norm import layer_norm_reference, opake_layer_norm

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def needs_cuda(request):
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def inputs(*shape, device, dtype=torch.float32, examples=None):
    torch.manual_seed(0)
    wide = (shape[-1],) if examples is None else (examples, shape[-1])
    return [torch.randn(*size, device=device).to(dtype) for size in (shape, wide, wide, shape)]


def gradients(op, x, weight, bias, dy, offset):
    given = [t.detach().requires_grad_() for t in (x, weight, bias)]
    out = op(*given, 1e-5, offset=offset)
    return [out.detach(), *torch.autograd.grad(out, given, dy)]


def errors(found, exact):
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(7, 63), (2, 5, 32), (3, 65, 100)], ids=str)
@pytest.mark.parametrize("per_example", [False, True], ids=["shared", "per-example"])
def test_values_and_gradients(device, dtype, offset, shape, per_example):
    given = inputs(*shape, device=device, dtype=dtype, examples=shape[0] if per_example else None)
    exact = gradients(layer_norm_reference, *(t.double() for t in given), offset)
    found = gradients(opake_layer_norm, *given, offset)
    plain = gradients(layer_norm_reference, *given, offset)
    assert [t.shape for t in found] == [t.shape for t in exact]
    for ours, theirs in zip(errors(found, exact), errors(plain, exact), strict=True):
        assert ours <= 2 * theirs + 1e-6


@pytest.mark.parametrize("device", DEVICES)
def test_under_vmap_of_grad(device):
    x, weight, bias, _ = inputs(4, 6, 32, device=device)

    def loss(weight, bias, row):
        return opake_layer_norm(row, weight, bias, offset=1.0).square().sum()

    found = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), (None, None, 0))(weight, bias, x)
    for i, row in enumerate(x):
        alone = torch.func.grad(loss, argnums=(0, 1))(weight, bias, row)
        for a, b in zip(found, alone, strict=True):
            torch.testing.assert_close(a[i], b, rtol=1e-5, atol=1e-5)


def test_a_wrong_shape_is_named():
    with pytest.raises(ValueError, match=r"bias has shape \(5,\) and weight \(8,\), expected both \(8,\) or both"):
        opake_layer_norm(torch.randn(2, 8), torch.ones(8), torch.zeros(5))
    with pytest.raises(TypeError, match=r"x must be floating point, got torch\.int64"):
        opake_layer_norm(torch.arange(8), torch.ones(8))
