"""The arithmetic of clipping: the bound holds in real numbers, in every dtype, where naive rounding breaks it."""

import math

import pytest
import torch

from opake.functional import clipped_grad, clipping
from opake.functional.clipping import ClippedSum, cast_toward_zero, clip_scale, row_norms
from opake.testing.live import peak_live_bytes


def random_rows(b, n, seed, dtype=torch.float32):
    return (torch.randn(b, n, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def clipped_alone(row, clip_norm):
    """The result for one row, as real numbers."""
    params = {"p": torch.zeros(row.shape, dtype=row.dtype)}
    total = ClippedSum(params, clip_norm)
    total.add({"p": row[None].clone()}, None)
    return total.result()["p"]


def naive(row, clip_norm, eps=1e-6):
    """What is usually written, all in the dtype of the gradient."""
    norm = row.norm()
    return row * (clip_norm / (norm + eps)).clamp(max=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("clip_norm", [1.0, 0.1, 7e-3, 300.0])
def test_the_bound_holds_for_every_row_in_its_own_dtype(dtype, clip_norm):
    for seed in range(40):
        row = random_rows(1, 301, seed, dtype)[0] * (2.0 ** (seed % 7))
        got = clipped_alone(row, clip_norm)
        assert got.dtype == dtype
        norm = float(got.double().norm())
        assert norm <= clip_norm
        ulp = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}.get(dtype, 2.0**-21)
        assert norm >= min(clip_norm, float(row.double().norm())) * (1 - ulp) - 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_naive_rounding_breaks_the_bound(dtype):
    rows = [random_rows(1, 301, seed, dtype)[0] for seed in range(200)]
    assert max(float(naive(row, 1.0, 0.0).double().norm()) for row in rows) > 1.0
    assert max(float((row * (1.0 / row.float().norm())).to(dtype).double().norm()) for row in rows) > 1.0
    assert max(float(clipped_alone(row, 1.0).double().norm()) for row in rows) <= 1.0


def test_rows_at_the_bound():
    # the float32 norms of these rows are 1 or less, their real norms are above
    rows = [row for row in (r / r.norm() for r in random_rows(500, 7, 3)) if row.norm() <= 1 < row.double().norm()]
    assert len(rows) > 10
    assert all(float(clipped_alone(row, 1.0).double().norm()) <= 1.0 for row in rows)


def test_rows_within_the_bound_are_not_touched():
    rows = random_rows(8, 50, 0)
    norms = row_norms([rows])
    assert clip_scale(norms, float(norms.max()) * 1.001).eq(1).all()
    assert torch.equal(clipped_alone(rows[0], 1e9), rows[0])
    assert torch.equal(clipped_alone(rows[0], math.inf), rows[0])
    assert torch.equal(clipped_alone(torch.zeros(4), 1.0), torch.zeros(4))


def test_the_scale_is_rounded_down():
    norms = torch.rand(10000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 100 + 1e-3
    for clip_norm in (1.0, 0.3, 1e-5):
        scale = clip_scale(norms, clip_norm)
        assert scale.dtype == torch.float32
        assert (scale.double() <= (clip_norm * (1 - 2.0**-23) / norms).clamp(max=1)).all()
        assert (scale.double() * norms * (1 + 2.0**-24) <= clip_norm * (1 + 1e-15)).all()
        assert (scale.double() * norms >= torch.minimum(norms, torch.tensor(clip_norm)) * (1 - 2.0**-21)).all()


def test_norms_of_huge_and_tiny_gradients():
    grads = [torch.tensor([[3e30, 0.0], [3e-30, 0.0]]), torch.tensor([[4e30], [4e-30]])]
    torch.testing.assert_close(row_norms(grads), torch.tensor([5e30, 5e-30], dtype=torch.float64), rtol=1e-6, atol=0)
    got = clipped_alone(torch.tensor([3e30, 4e30]), 1.0)
    torch.testing.assert_close(got, torch.tensor([0.6, 0.8]))
    assert float(got.double().norm()) <= 1.0


def test_norm_is_over_all_parameters_of_every_shape():
    g = torch.Generator().manual_seed(0)
    grads = [torch.randn(4, *shape, generator=g) for shape in ((), (3,), (2, 5), (2, 1, 3, 2), (0, 3))]
    want = torch.stack([torch.cat([x[i].flatten() for x in grads]).double().norm() for i in range(4)])
    torch.testing.assert_close(row_norms(grads), want, rtol=1e-12, atol=0)


@pytest.mark.parametrize("size", [1, 7, 100])
def test_slices_change_nothing(monkeypatch, size):
    g = torch.Generator().manual_seed(0)
    shapes = {"scalar": (), "vector": (11,), "matrix": (6, 5), "empty": (0,)}
    params = {name: torch.zeros(shape) for name, shape in shapes.items()}
    grads = {name: torch.randn(4, *shape, generator=g) for name, shape in shapes.items()}

    def summed():
        total = ClippedSum(params, 1.0)
        stats = total.add({name: grad.clone() for name, grad in grads.items()}, None)
        return total.result(), stats

    whole, stats = summed()
    monkeypatch.setattr(clipping, "_SLICE", size)
    pieces, piece_stats = summed()
    for name in shapes:
        torch.testing.assert_close(pieces[name], whole[name], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(piece_stats[0], stats[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cast_toward_zero_never_raises_a_magnitude(dtype):
    g = torch.Generator().manual_seed(0)
    x = torch.cat([torch.randn(5000, generator=g) * 10.0**e for e in (-9, -6, -3, 0, 3, 6)])
    x = torch.cat([x, torch.tensor([0.0, -0.0, 1e38, -1e38, 3.4e38, 1e-44, 65519.0, 65520.0])])
    y = cast_toward_zero(x, dtype)
    assert y.dtype == dtype
    assert (y.float().abs() <= x.abs()).all()
    assert y.isfinite().all()
    step_up = torch.nextafter(y.double(), torch.full_like(y, math.inf, dtype=torch.float64).copysign(x.double()))
    assert step_up.shape == x.shape
    # no further away than the next value of the dtype, found through its bits
    above = (y.view(torch.int16) + 1).view(dtype)
    assert ((above.float().abs() > x.abs()) | ~above.isfinite() | x.eq(0)).all()
    assert torch.equal(x.to(dtype)[x.to(dtype).float().abs() <= x.abs()], y[x.to(dtype).float().abs() <= x.abs()])


def test_cast_to_the_same_or_a_wider_dtype_changes_nothing():
    x = torch.randn(10)
    assert cast_toward_zero(x, torch.float32) is x
    assert torch.equal(cast_toward_zero(x, torch.float64), x.double())


def test_no_second_copy_of_a_large_gradient(monkeypatch):
    monkeypatch.setattr(clipping, "_SLICE", 1000)
    params = {"p": torch.zeros(500, 200, dtype=torch.bfloat16)}
    grad = torch.randn(4, 500, 200).to(torch.bfloat16)

    def run():
        total = ClippedSum(params, 1.0)
        total.add({"p": grad}, None)

    assert peak_live_bytes(run) < 1.1 * 500 * 200 * 4


def test_expanded_and_transposed_gradients_are_read_as_they_are():
    base = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(0))
    for grad in (base.transpose(1, 2), base[:1].expand(4, -1, -1), base.movedim(0, 2).contiguous().movedim(2, 0)):
        total = ClippedSum({"p": torch.zeros(grad.shape[1:])}, 2.0)
        norms, clipped, nonfinite = total.add({"p": grad}, None)
        want = grad.flatten(1).norm(dim=1)
        torch.testing.assert_close(norms, want)
        torch.testing.assert_close(
            total.result()["p"], (grad * (2.0 / want).clamp(max=1)[:, None, None]).sum(0), rtol=1e-5, atol=1e-6
        )
        assert (int(clipped), int(nonfinite)) == (4, 0)


def test_tf32_and_bf16_matmul_settings_do_not_reach_the_sum():
    row = random_rows(1, 3000, 5)[0]
    torch.set_float32_matmul_precision("medium")
    try:
        loose = clipped_alone(row, 1.0)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(loose, clipped_alone(row, 1.0))


def test_many_rows_sum_to_within_their_number_times_the_bound():
    def loss(params, x):
        return (params["p"] * x).sum()

    x = torch.ones(64, 10) * 5
    out = clipped_grad(loss, clip_norm=0.5)({"p": torch.zeros(10)}, x)
    assert 31.99 < float(out.grads["p"].double().norm()) <= 32.0
