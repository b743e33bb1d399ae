"""Poisson sampling by its statistics, and the microbatches made of what it draws."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch.utils.data import DataLoader

from opake.collate import Microbatches, Rows
from opake.errors import InputError
from opake.trainer.randomness import Randomness
from opake.trainer.sampling import PoissonSampler

ROWS, RATE, STEPS = 40, 0.1, 4000


def sampler(seed=7, rank=0, processes=1, rows=ROWS, rate=RATE, first=lambda: 0) -> PoissonSampler:
    return PoissonSampler(rows, rate, Randomness(seed, rank), first=first, processes=processes)


def drawn(*samplers: PoissonSampler) -> torch.Tensor:
    """(STEPS, ROWS) of 0 and 1."""
    found = torch.zeros(STEPS, ROWS)
    for one in samplers:
        for step in range(STEPS):
            found[step, one.draw(step)] += 1
    return found


@pytest.fixture(scope="module", params=[1, 2, 3])
def table(request) -> torch.Tensor:
    return drawn(*(sampler(rank=rank, processes=request.param) for rank in range(request.param)))


def test_no_row_is_drawn_twice(table) -> None:
    assert set(table.unique().tolist()) == {0.0, 1.0}


def test_inclusion_counts_are_binomial(table) -> None:
    z = (table.sum(0) - STEPS * RATE) / math.sqrt(STEPS * RATE * (1 - RATE))
    assert stats.chi2.cdf(float(z.square().sum()), ROWS) == pytest.approx(0.5, abs=0.499)
    assert z.abs().max() < 4


def test_pairs_are_independent(table) -> None:
    together = (table.T @ table)[~torch.eye(ROWS, dtype=torch.bool)]
    p = RATE**2
    z = (together - STEPS * p) / math.sqrt(STEPS * p * (1 - p))
    assert z.abs().max() < 4.5
    assert abs(float(z.mean())) < 0.3


def test_steps_are_independent(table) -> None:
    again = (table[1:] * table[:-1]).sum() - (STEPS - 1) * ROWS * RATE**2
    assert abs(float(again)) < 3 * math.sqrt((STEPS - 1) * ROWS * RATE**2)


def test_sizes_are_binomial_and_zero_occurs(table) -> None:
    sizes = table.sum(1)
    variance = ROWS * RATE * (1 - RATE)
    assert sizes.min() == 0
    assert sizes.max() > 2 * ROWS * RATE
    assert float(sizes.mean()) == pytest.approx(ROWS * RATE, abs=3 * math.sqrt(variance / STEPS))
    assert float(sizes.var()) == pytest.approx(variance, rel=3 * math.sqrt(2 / STEPS))
    empty = (1 - RATE) ** ROWS
    assert int((sizes == 0).sum()) == pytest.approx(STEPS * empty, abs=3 * math.sqrt(STEPS * empty))


def test_draws_differ_between_runs_unless_seeded() -> None:
    def several(seed):
        return [sampler(seed).draw(step) for step in range(20)]

    assert several(3) == several(3)
    assert several(3) != several(4)
    assert several(None) != several(None)


def test_an_epoch_starts_where_training_stands_and_rows_are_python_ints() -> None:
    one = sampler(first=lambda: 30)
    epoch = list(one)
    assert len(epoch) == len(one) == 10
    assert epoch == [one.draw(step) for step in range(30, 40)]
    assert {type(row) for batch in epoch for row in batch} == {int}


def test_more_processes_than_rows() -> None:
    assert sampler(rank=3, processes=4, rows=2, rate=1.0).draw(0) == []


def collate(rows: list[int]) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor(rows).float()[:, None] + 1, "nested": (torch.ones(len(rows)),)}


@pytest.mark.parametrize("count", [0, 1, 3, 4, 9])
def test_microbatches_have_one_size_and_weights_say_which_rows_are_real(count) -> None:
    batch = Microbatches(collate, 4)(list(range(count)))
    assert batch.rows == count
    assert len(batch.microbatches) == len(batch.weights) == -(-count // 4)
    assert all(rows["x"].shape == (4, 1) and rows["nested"][0].shape == (4,) for rows in batch.microbatches)
    real = [rows["x"][weight > 0].flatten().tolist() for rows, weight in zip(*batch[:2], strict=True)]
    assert [x for part in real for x in part] == [i + 1 for i in range(count)]
    filling = [rows["x"][weight == 0] for rows, weight in zip(*batch[:2], strict=True)]
    assert all((rows == 0).all() for rows in filling)


def test_nothing_of_a_row_is_kept() -> None:
    collator = Microbatches(collate, 4)
    before = dict(vars(collator))
    collator([1, 2, 3])
    assert vars(collator) == before


@pytest.mark.parametrize(
    ("collator", "says"),
    [
        (lambda rows: {"input_ids": torch.zeros(1, 12)}, r"input_ids of shape \(1, 12\) from 3 rows"),
        (lambda rows: {"count": torch.tensor(3)}, r"count of shape \(\) from 3 rows"),
        (lambda rows: [1, 2], "returned list"),
        (lambda rows: {"x": torch.zeros(3), "names": ["a", "b", "c"]}, "names a list that is not of tensors alone"),
        (lambda rows: {"x": torch.zeros(3).numpy()}, "x a ndarray that is not of tensors alone"),
        (lambda rows: {"x": (torch.zeros(3), (torch.zeros(3), 2))}, "x a tuple that is not of tensors alone"),
        (lambda rows: {"x": {"y": ["a", "b", "c"]}}, "x a list that is not of tensors alone"),
    ],
)
def test_what_is_not_one_entry_a_row_is_refused(collator, says) -> None:
    with pytest.raises(InputError, match=says):
        Microbatches(collator, 4)([1, 2, 3])


def test_what_is_the_same_for_all_rows_is_handed_through() -> None:
    (made,), (weight,), count = Microbatches(lambda rows: {"x": torch.ones(2), "how": "mean", "none": None}, 3)([1, 2])
    assert made["x"].tolist() == [1, 1, 0]
    assert (made["how"], made["none"], weight.tolist(), count) == ("mean", None, [1, 1, 0], 2)


def test_a_batch_on_a_device_says_which_rows_are_real_without_numbers_to_check() -> None:
    batch = Microbatches(collate, 4)([1, 2, 3, 4, 5]).to(torch.device("cpu"))
    assert [weight.tolist() for weight in batch.weights] == [[True] * 4, [True, False, False, False]]
    assert batch.rows == 5
    assert batch.microbatches[1]["x"].flatten().tolist() == [6, 0, 0, 0]


class Together(list):
    """A data set that fetches many rows at once, and fails on none."""

    def __getitems__(self, places):
        assert places
        return [self[place] for place in places]


@pytest.mark.parametrize("dataset", [list(range(ROWS)), Together(range(ROWS))])
def test_a_loader_yields_empty_batches(dataset) -> None:
    loader = DataLoader(Rows(dataset), batch_sampler=sampler(rate=0.02, seed=1), collate_fn=Microbatches(collate, 2))
    sizes = [batch.rows for batch in loader]
    assert 0 in sizes
    assert max(sizes) > 0
