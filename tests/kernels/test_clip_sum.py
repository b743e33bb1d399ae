"""Norms and scaled sums over many gradients at once, against float64."""

from __future__ import annotations

import pytest
import torch

from opake_kernels import clip_sum
from opake_kernels.clip_sum import (
    add_scaled_rows,
    add_scaled_rows_reference,
    row_square_sums,
    row_square_sums_reference,
)

SHAPES = [(3, 5), (4097,), (1,), (2, 3, 4), (0, 7), (64, 65)]


def gradients(dtypes: list[torch.dtype], B: int = 3, device: str = "cpu") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = zip(SHAPES, (dtypes * len(SHAPES))[: len(SHAPES)], strict=True)
    return [torch.randn(B, *shape, generator=generator).to(device, dtype) for shape, dtype in shapes]


@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.bfloat16], [torch.float32, torch.bfloat16, torch.float16]])
def test_square_sums(dtypes: list[torch.dtype], device: str) -> None:
    grads = gradients(dtypes, device=device)
    expected = sum(g.double().flatten(1).square().sum(1) for g in grads)
    torch.testing.assert_close(row_square_sums(grads), expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(row_square_sums_reference(grads), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.bfloat16, torch.float32]])
def test_scaled_sum_adds_to_what_is_there(dtypes: list[torch.dtype], device: str) -> None:
    grads = gradients(dtypes, device=device)
    scale = torch.tensor([0.5, 2.0, 0.25], device=device)
    dropped = torch.tensor([False, True, False], device=device)
    grads[0][1, 0, 0], grads[1][1, 7] = float("nan"), float("inf")
    kept = [g.clone() for g in grads]
    for run in (add_scaled_rows, add_scaled_rows_reference):
        totals = [torch.ones(g.shape[1:], device=device) for g in grads]
        run(totals, grads, scale, dropped)
        for total, g in zip(totals, grads, strict=True):
            expected = 1 + 0.5 * g[0].double() + 0.25 * g[2].double()
            torch.testing.assert_close(total.double(), expected, rtol=2e-6, atol=1e-6)
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(grads, kept, strict=True))


def test_what_the_kernel_does_not_take_goes_to_the_twin(device: str) -> None:
    grads = [torch.randn(2, 3, 4, dtype=torch.float64, device=device), torch.randn(4, 2, device=device).T]
    expected = sum(g.double().flatten(1).square().sum(1) for g in grads)
    torch.testing.assert_close(row_square_sums(grads), expected)
    totals = [torch.zeros(3, 4, dtype=torch.float64, device=device), torch.zeros(4, device=device)]
    add_scaled_rows(totals, grads, torch.ones(2, device=device), torch.zeros(2, dtype=torch.bool, device=device))
    for total, g in zip(totals, grads, strict=True):
        torch.testing.assert_close(total, g.sum(0))


def test_scalars(device: str) -> None:
    grads = [torch.tensor([1.0, 2.0], device=device), torch.tensor([[3.0], [4.0]], device=device)]
    assert row_square_sums(grads).tolist() == [10.0, 20.0]
    assert row_square_sums_reference(grads).tolist() == [10.0, 20.0]
    totals = [torch.zeros((), device=device), torch.zeros(1, device=device)]
    add_scaled_rows(totals, grads, torch.ones(2, device=device), torch.tensor([False, True], device=device))
    assert [float(t) for t in totals] == [1.0, 3.0]


def test_no_rows(device: str) -> None:
    grads = [torch.zeros(0, 3, device=device)]
    assert row_square_sums(grads).shape == (0,)
    totals = [torch.ones(3, device=device)]
    add_scaled_rows(totals, grads, torch.zeros(0, device=device), torch.zeros(0, dtype=torch.bool, device=device))
    assert torch.equal(totals[0], torch.ones(3, device=device))


def test_two_runs_are_equal_to_the_bit_and_layouts_are_bounded(device: str) -> None:
    grads = gradients([torch.float32], device=device)
    assert torch.equal(row_square_sums(grads), row_square_sums(grads))
    for n in range(1, 40):
        row_square_sums([torch.ones(1, n, device=device)])
    assert len(clip_sum._layouts) <= 32
