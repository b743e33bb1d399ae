"""Residual addition fused with RMSNorm: both results, both gradients, every transform."""

import pytest
import torch

from opake_kernels import add_rms_norm, rms_launch
from opake_kernels.add_rms_norm import fused_add_rms_norm_reference, opake_fused_add_rms_norm
from opake_kernels.rms_norm import opake_rms_norm

VARIANTS = {"llama": {}, "olmo": {"cast": "after"}, "gemma": {"offset": 1.0}}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(2, 3, 8), (9, 7, 41), (1, 1), (5,), (0, 4), (3, 0), (2, 300, 8)]
FP32, BF16 = torch.float32, torch.bfloat16


def _bound(**options):
    return (lambda x, r, *w: opake_fused_add_rms_norm(x, r, *(w or [None]), 1e-5, **options)), (
        lambda x, r, *w: fused_add_rms_norm_reference(x, r, *(w or [None]), 1e-5, **options)
    )


def _args(shape, dtype, device):
    x, r, w = (torch.randn(s, device=device) for s in (shape, shape, shape[-1:]))
    return [x.to(dtype), r.to(dtype), w.to(dtype)]


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape, device, check_op):
    check_op(*_bound(), _args(shape, FP32, device), (0, 1, 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant, dtype, device, check_op):
    check_op(*_bound(**VARIANTS[variant]), _args((3, 5, 40), dtype, device), (0, 1, 2))


@pytest.mark.parametrize("variant", VARIANTS)
def test_mixed_dtypes(variant, device, check_op):
    x, r, w = _args((3, 5, 40), FP32, device)
    for args in ([x.bfloat16(), r, w], [x.bfloat16(), r.bfloat16(), w], [x, r.bfloat16(), w.bfloat16()]):
        check_op(*_bound(**VARIANTS[variant]), args, (0, 1, 2))


def test_equals_the_two_ops(device):
    # the sum is rounded before it is normalised, so the fused pair is the unfused one bit for bit
    x, r, w = _args((16, 48), BF16, device)
    norm, total = opake_fused_add_rms_norm(x, r, w)
    assert torch.equal(total, x + r)
    assert torch.equal(norm, opake_rms_norm(x + r, w))


@pytest.mark.parametrize("diff", [(0,), (1,), (0, 2), (1, 2), (0, 1)])
def test_some_gradients(diff, device, check_op):
    check_op(*_bound(), _args((3, 5, 24), FP32, device), diff)


def test_weight_gradient_alone(device, check_op):
    ours, twin = _bound()
    check_op(lambda *a: ours(*a)[0], lambda *a: twin(*a)[0], _args((3, 5, 24), FP32, device), (2,))


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("rows", [False, True])
def test_one_result_used(used, rows, device, check_op):
    args = _args((3, 5, 24), FP32, device)
    if rows:
        args[2] = torch.randn(3, 24, device=device)
    ours, twin = _bound()
    # an unused result sends no gradient; times zero gives the twin a weight gradient to compare with
    check_op(lambda *a: ours(*a)[used], lambda *a: twin(*a)[used] + 0 * twin(*a)[0], args, (0, 1, 2))


def test_unused_sum_is_not_read(device, monkeypatch):
    seen = []
    real = rms_launch.launch
    monkeypatch.setattr(rms_launch, "launch", lambda k, grid, on, *a, **m: (seen.append(a), real(k, grid, on, *a, **m)))
    x, r, w = _args((3, 8), FP32, device)
    opake_fused_add_rms_norm(x.requires_grad_(), r, w)[0].sum().backward()
    assert seen[1][4] is None


def test_without_weight(device, check_op):
    check_op(*_bound(), _args((3, 5, 24), FP32, device)[:2], (0, 1))


@pytest.mark.parametrize("shape", [(3, 5, 24), (3, 24), (2, 600, 8), (4, 2, 3, 16), (0, 2, 8), (2, 0, 8)])
def test_weight_of_one_row_an_example(shape, device, check_op):
    x, r, _ = _args(shape, FP32, device)
    *_, dw = check_op(*_bound(), [x, r, torch.randn(shape[0], shape[-1], device=device)], (0, 1, 2))
    assert dw.shape == (shape[0], shape[-1])


@pytest.mark.parametrize("rows", [False, True])
def test_wider_than_a_tile(rows, device, check_op):
    x, r, w = _args((2, 1, 16400), FP32, device)
    check_op(*_bound(), [x, r, torch.stack((w, -w)) if rows else w], (0, 1, 2))


def test_layouts(device, check_op):
    both = torch.randn(2, 2, 5, 3, 24, device=device)
    x, r = both
    w = torch.randn(24, device=device)
    for a, b in [
        (x.transpose(1, 2), r.transpose(1, 2)),
        (x.transpose(1, 2), r.reshape(2, 3, 5, 24)),
        (x[:, 1:], r[:, 1:]),
        (x[:1].expand_as(x), r[..., :1].expand_as(x)),
        (x, r.permute(3, 0, 1, 2).reshape(24, 2, 5, 3).permute(1, 2, 3, 0)),
    ]:
        check_op(*_bound(), [a, b, w], (0, 1, 2))


def test_gradients_of_two_leaves_do_not_share_memory(device):
    x, r, w = _args((3, 8), FP32, device)
    x.requires_grad_()
    r.requires_grad_()
    norm, total = opake_fused_add_rms_norm(x, r, w)
    (norm.sum() + total.square().sum()).backward()
    kept = r.grad.clone()
    x.grad.zero_()
    assert torch.equal(r.grad, kept)


def test_transforms(device, check_transforms):
    check_transforms(*_bound(), _args((2, 6), FP32, device), (0, 1, 2))


def test_transforms_over_a_weight_of_one_row_an_example(device, check_transforms):
    x, r, _ = _args((2, 2, 6), FP32, device)
    check_transforms(*_bound(), [x, r, torch.randn(2, 6, device=device)], (0, 2))


def test_refusals(device, check_refusals):
    check_refusals(_bound()[0], _args((2, 5), FP32, device), (0, 1, 2))


def test_bad_arguments(device):
    x, r, w = _args((3, 4, 8), FP32, device)
    with pytest.raises(ValueError, match=r"residual has shape \(3, 4, 7\), expected \(3, 4, 8\)"):
        opake_fused_add_rms_norm(x, r[..., :7], w)
    with pytest.raises(ValueError, match="x and residual must be on one device"):
        opake_fused_add_rms_norm(x, r.to("meta"), w)
    with pytest.raises(TypeError, match=r"residual must be floating point, got torch.int64"):
        opake_fused_add_rms_norm(x, r.long(), w)
    with pytest.raises(ValueError, match=r"weight has shape \(5,\), expected \(8,\)"):
        opake_fused_add_rms_norm(x, r, w[:5])


def test_double_precision_takes_the_twin(device, monkeypatch):
    monkeypatch.setattr(add_rms_norm, "_PAIR", None)
    args = _args((3, 8), torch.float64, device)
    for got, want in zip(opake_fused_add_rms_norm(*args), fused_add_rms_norm_reference(*args), strict=True):
        assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("C", [128, 896, 4096, 8192, 16384, 16400])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_widths_on_a_gpu(dtype, C, check_op):
    x, r, w = _args((4, 2**18 // C + 1, C), dtype, "cuda")
    check_op(*_bound(), [x, r, w], (0, 1, 2))
    check_op(*_bound(offset=1.0), [x, r, w.expand(4, C)], (0, 1, 2))


@pytest.mark.gpu
def test_more_than_two_billion_elements_on_a_gpu():
    R, C = 2**31 // 4096 + 96, 4096
    x, r = (torch.randn(R, C, device="cuda", dtype=BF16).requires_grad_() for _ in range(2))
    w = torch.randn(C, device="cuda", dtype=BF16)
    norm, total = opake_fused_add_rms_norm(x, r, w)
    dy, ds = torch.randn_like(norm), torch.randn_like(norm)
    (dx,) = torch.autograd.grad((norm, total), x, (dy, ds))
    for cut in (slice(0, 4096), slice(R - 4096, R)):
        xs, rs = (t[cut].detach().double().requires_grad_() for t in (x, r))
        s = xs + rs
        want = fused_add_rms_norm_reference(s.to(BF16).double(), torch.zeros_like(s), w.double())[0]
        torch.testing.assert_close(total[cut].double(), s, rtol=2**-7, atol=2**-9)
        torch.testing.assert_close(norm[cut].double(), want, rtol=2**-6, atol=2**-9)
        both = fused_add_rms_norm_reference(xs, rs, w.double())
        (dxs,) = torch.autograd.grad(both, xs, (dy[cut].double(), ds[cut].double()))
        torch.testing.assert_close(dx[cut].double(), dxs, rtol=2**-6, atol=2**-5)
