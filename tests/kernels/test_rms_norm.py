"""RMSNorm: the variants, weights of one row an example, layouts, widths, refusals."""

import pytest
import torch

from opake_kernels import rms_launch, rms_norm
from opake_kernels.rms_norm import opake_rms_norm, rms_norm_reference
from opake_kernels.strided_rows import memory_order, row_strides

VARIANTS = {"llama": {}, "olmo": {"cast": "after"}, "gemma": {"offset": 1.0}, "both": {"offset": 1.0, "cast": "before"}}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(2, 3, 8), (9, 7, 41), (1, 2), (5,), (0, 4), (3, 0), (3, 1, 129)]
BF16, FP32 = torch.bfloat16, torch.float32


def _bound(**options):
    """The op and its twin with the options given."""
    return (lambda x, *w: opake_rms_norm(x, *(w or [None]), 1e-5, **options)), (
        lambda x, *w: rms_norm_reference(x, *(w or [None]), 1e-5, **options)
    )


def _args(shape, dtype, device, weight_dtype=None):
    x, w = torch.randn(shape, device=device) * 2, torch.randn(shape[-1], device=device)
    return [x.to(dtype), w.to(weight_dtype or dtype)]


def _per_example(shape, dtype, device):
    x, _ = _args(shape, dtype, device)
    return [x, torch.randn(shape[0], shape[-1], device=device).to(dtype)]


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape, device, check_op):
    check_op(*_bound(), _args(shape, FP32, device), (0, 1))


@pytest.mark.parametrize("shape", [(1, 1), (2, 1, 1)])
def test_one_column(shape, device, check_op):
    # with a tiny eps dx would be rounding alone
    op, twin = (lambda x, w, f=f: f(x, w, 0.5) for f in (opake_rms_norm, rms_norm_reference))
    check_op(op, twin, _args(shape, FP32, device), (0, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant, dtype, device, check_op):
    check_op(*_bound(**VARIANTS[variant]), _args((3, 5, 40), dtype, device), (0, 1))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("x_dtype", "w_dtype"), [(BF16, FP32), (FP32, BF16), (torch.float16, FP32)])
def test_mixed_dtypes(x_dtype, w_dtype, variant, device, check_op):
    args = _args((3, 5, 40), x_dtype, device, w_dtype)
    out, dx, dw = check_op(*_bound(**VARIANTS[variant]), args, (0, 1))
    rounds_first = variant in ("llama", "both")
    assert out.dtype == (torch.promote_types(x_dtype, w_dtype) if rounds_first else x_dtype)
    assert (dx.dtype, dw.dtype) == (x_dtype, w_dtype)


def test_bfloat16_equals_the_stock_rounding(device):
    # one unit of the weight's offset in bfloat16 is lost unless 1 + w is summed in fp32
    x, w = _args((64, 48), BF16, device)
    small = w * 2**-9
    for options, stock in [
        ({}, lambda x, w, h: w * h.to(x.dtype)),
        ({"cast": "after"}, lambda x, w, h: (w * h).to(x.dtype)),
        ({"offset": 1.0}, lambda x, w, h: (h * (1.0 + w.float())).to(x.dtype)),
    ]:
        h = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        want, got = stock(x, small, h), opake_rms_norm(x, small, **options)
        # the last bit may differ where 1 / rms does, which flips a rounding now and then
        assert (got != want).float().mean() < 0.01
        torch.testing.assert_close(got, want, rtol=2**-7, atol=0)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_without_weight(dtype, device, check_op):
    check_op(*_bound(), _args((3, 5, 40), dtype, device)[:1], (0,))


@pytest.mark.parametrize("diff", [(0,), (1,)])
def test_one_gradient(diff, device, check_op):
    check_op(*_bound(), _args((3, 5, 40), FP32, device), diff)


def test_frozen_weight_gets_no_work(device, monkeypatch):
    made = []
    real = rms_launch._launch_backward
    monkeypatch.setattr(rms_launch, "_launch_backward", lambda *a: (made.append(a[5:7]), real(*a)))
    x, w = _args((3, 8), FP32, device)
    opake_rms_norm(x.requires_grad_(), w).sum().backward()
    assert made[0][0] is not None
    assert made[0][1] is None


@pytest.mark.parametrize("shape", [(3, 5, 24), (3, 24), (4, 2, 3, 16), (3, 700, 8), (2, 0, 8), (0, 3, 8)])
def test_weight_of_one_row_an_example(shape, device, check_op):
    _, _, dw = check_op(*_bound(), _per_example(shape, FP32, device), (0, 1))
    assert dw.shape == (shape[0], shape[-1])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_of_one_row_an_example_in_every_variant(dtype, variant, device, check_op):
    check_op(*_bound(**VARIANTS[variant]), _per_example((3, 5, 24), dtype, device), (0, 1))


def test_expanded_weight_equals_a_loop(device):
    x, w = _args((4, 6, 16), FP32, device)
    rows = w.expand(4, 16).requires_grad_()
    (dw,) = torch.autograd.grad(opake_rms_norm(x, rows).square().sum(), rows)
    for i in range(4):
        one = w.clone().requires_grad_()
        (want,) = torch.autograd.grad(opake_rms_norm(x[i], one).square().sum(), one)
        torch.testing.assert_close(dw[i], want)


def test_gradients_do_not_hear_neighbours(device):
    x, w = _args((4, 300, 8), FP32, device)
    other = torch.cat((x[:1], x[1:] * 1e3))
    rows = w.expand(4, 8).requires_grad_()
    first, second = (torch.autograd.grad(opake_rms_norm(t, rows).square().sum(), rows)[0][0] for t in (x, other))
    assert torch.equal(first, second)


# wider than a tile of the backward, and of the forward
@pytest.mark.parametrize("C", [16400, 32800])
@pytest.mark.parametrize("weight", ["shared", "rows", "none"])
@pytest.mark.parametrize("variant", ["llama", "gemma"])
def test_wider_than_a_tile(variant, weight, C, device, check_op):
    x, w = _args((2, 2, C), FP32, device)
    args = {"shared": [x, w], "rows": [x, torch.stack((w, -w))], "none": [x]}[weight]
    check_op(*_bound(**VARIANTS[variant]), args, tuple(range(len(args))))


def test_wider_than_a_tile_in_half_precision(device, check_op):
    check_op(*_bound(), _args((2, 16400), BF16, device), (0, 1))


def _layouts(device):
    both = torch.randn(2, 5, 3, 24, device=device)
    return {
        "transposed": both.transpose(1, 2),
        "sliced": both[..., 4:20],
        "sliced and transposed": both[..., :16].transpose(1, 2),
        "expanded": both[:1, :1].expand(2, 5, 3, 24),
        "every other row": both[:, ::2],
        "column stride": both[..., ::2],
        "columns first": both.permute(3, 0, 1, 2),
        "reversed": both.permute(2, 1, 0, 3),
    }


@pytest.mark.parametrize("name", _layouts("cpu"))
def test_layouts(name, device, check_op):
    x = _layouts(device)[name]
    for w in (torch.randn(x.shape[-1], device=device), torch.randn(x.shape[0], x.shape[-1], device=device)):
        check_op(*_bound(), [x, w], (0, 1))


@pytest.mark.parametrize("name", ["transposed", "sliced", "sliced and transposed", "expanded"])
@pytest.mark.parametrize("rows", [False, True])
def test_views_are_read_in_place(name, rows, device, monkeypatch):
    seen = []
    real = rms_launch.launch
    monkeypatch.setattr(rms_launch, "launch", lambda k, grid, on, *a, **m: (seen.append(a), real(k, grid, on, *a, **m)))
    x = _layouts(device)[name]
    w = torch.randn(x.shape[0], x.shape[-1], device=device) if rows else None
    y = opake_rms_norm(x.requires_grad_(), w)
    (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
    forward, backward = seen
    assert forward[0].data_ptr() == backward[1].data_ptr() == x.data_ptr()
    assert y.stride() == dx.stride() == torch.empty_like(x).stride()


def test_incoming_gradient_in_another_layout(device):
    x, w = _args((2, 3, 5, 8), FP32, device)
    x.requires_grad_()
    grad = torch.randn(2, 5, 8, 3, device=device).permute(0, 3, 1, 2)
    for layout in (grad, grad[..., :1].expand(2, 3, 5, 8), torch.ones((), device=device).expand(2, 3, 5, 8)):
        kept = layout.clone()
        (got,) = torch.autograd.grad(opake_rms_norm(x, w), x, layout)
        (want,) = torch.autograd.grad(rms_norm_reference(x, w), x, layout)
        torch.testing.assert_close(got, want)
        assert torch.equal(layout, kept)


def test_strides_of_rows():
    x = torch.empty(2, 5, 3, 24)
    assert row_strides(x)[1:] == (1, 24, 0)
    assert row_strides(x[:, :, :2])[1:] == (2, 72, 24)
    assert row_strides(x[:, 1:, :2])[1:] == (1, 24, 0)
    assert memory_order(x, 0) is None
    assert memory_order(x.transpose(1, 2), 0) == (0, 2, 1, 3)
    assert memory_order(x.transpose(0, 1), 1) is None


@pytest.mark.parametrize("variant", ["llama", "gemma"])
def test_transforms(variant, device, check_transforms):
    check_transforms(*_bound(**VARIANTS[variant]), _args((2, 6), FP32, device), (0, 1))


def test_transforms_without_weight(device, check_transforms):
    check_transforms(*_bound(), _args((2, 6), FP32, device)[:1], (0,))


def test_transforms_over_a_weight_of_one_row_an_example(device, check_transforms):
    check_transforms(*_bound(), _per_example((2, 3, 6), FP32, device), (0, 1))


def test_zero_examples(device):
    x, w = torch.randn(0, 2, 5, device=device), torch.randn(5, device=device)
    both = torch.func.vmap(torch.func.grad(lambda x, w: opake_rms_norm(x, w).sum(), (0, 1)), (0, None))(x, w)
    assert [tuple(g.shape) for g in both] == [(0, 2, 5), (0, 5)]


def test_no_rows_give_a_zero_weight_gradient(device):
    x, w = torch.randn(0, 5, device=device), torch.randn(5, device=device, requires_grad=True)
    (dw,) = torch.autograd.grad(opake_rms_norm(x, w).sum(), w)
    assert torch.equal(dw, torch.zeros(5, device=device))


def test_refusals(device, check_refusals):
    check_refusals(_bound()[0], _args((2, 5), FP32, device), (0, 1))


def test_bad_arguments(device):
    x = torch.randn(3, 4, 8, device=device)
    for weight in (
        torch.randn(7, device=device),
        torch.randn(2, 8, device=device),
        torch.randn(3, 4, 8, device=device),
    ):
        with pytest.raises(ValueError, match=r"weight has shape .*expected \(8,\).*\(3, 8\).*\(3, 4, 8\)"):
            opake_rms_norm(x, weight)
    with pytest.raises(ValueError, match="cast must be 'before' or 'after', got 'middle'"):
        opake_rms_norm(x, None, cast="middle")
    with pytest.raises(ValueError, match="got a scalar"):
        opake_rms_norm(torch.tensor(1.0), None)
    with pytest.raises(TypeError, match=r"x must be floating point, got torch.int64"):
        opake_rms_norm(torch.ones(2, 2, dtype=torch.int64), None)
    with pytest.raises(ValueError, match=r"x and weight must be on one device, got .* and meta"):
        opake_rms_norm(x, torch.randn(8, device="meta"))


def test_double_precision_takes_the_twin(device, monkeypatch):
    monkeypatch.setattr(rms_norm, "_PAIR", None)
    x, w = _args((3, 8), torch.float64, device)
    assert torch.equal(opake_rms_norm(x, w), rms_norm_reference(x, w))
    assert torch.autograd.gradcheck(lambda x, w: opake_rms_norm(x, w), (x.requires_grad_(), w.requires_grad_()))


@pytest.mark.gpu
@pytest.mark.parametrize("C", [64, 128, 256, 896, 2880, 4096, 8192, 8200, 16384, 16400, 32768, 65536])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_widths_on_a_gpu(dtype, C, check_op):
    rows = max(2, 2**20 // C)
    args = _args((4, rows // 4 + 1, C), dtype, "cuda")
    check_op(*_bound(), args, (0, 1))
    check_op(*_bound(offset=1.0), [args[0], args[1].expand(4, C)], (0, 1))


@pytest.mark.gpu
def test_same_every_time_on_a_gpu():
    x, w = _args((8, 1000, 896), BF16, "cuda")
    x.requires_grad_()
    runs = []
    for _ in range(3):
        rows = w.expand(8, 896).detach().requires_grad_()
        runs.append(torch.autograd.grad(opake_rms_norm(x, rows).float().square().sum(), (x, rows)))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


@pytest.mark.gpu
def test_more_than_two_billion_elements_on_a_gpu():
    R, C = 2**31 // 4096 + 96, 4096
    x = torch.randn(R, C, device="cuda", dtype=BF16).requires_grad_()
    w = torch.randn(C, device="cuda", dtype=BF16, requires_grad=True)
    y = opake_rms_norm(x, w)
    dy = torch.randn_like(y)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    want = torch.zeros(C, device="cuda", dtype=torch.float64)
    for part in range(0, R, 2**15):
        cut = slice(part, part + 2**15)
        xs, ws = x[cut].detach().double().requires_grad_(), w.detach().double().requires_grad_()
        ys = rms_norm_reference(xs, ws)
        dxs, dws = torch.autograd.grad(ys, (xs, ws), dy[cut].double())
        want += dws
        torch.testing.assert_close(y[cut].double(), ys, rtol=2**-6, atol=2**-9)
        torch.testing.assert_close(dx[cut].double(), dxs, rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(dw.double(), want, rtol=2**-7, atol=2**-7 * want.abs().max().item())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_device_than_the_current_one(check_op):
    check_op(*_bound(), _args((3, 5, 40), BF16, "cuda:1"), (0, 1))
