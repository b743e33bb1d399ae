"""Poisson sampling: the only place that knows the rate at which rows are drawn.

A row is in a step with probability q, independently of everything else; that is what the accountant assumes, so q is
read from here and nowhere else. Of W processes each draws from its own share of the rows, which together is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.utils.data import Sampler

from opake.trainer.randomness import Randomness


class PoissonSampler(Sampler[list[int]]):
    """Lists of row numbers, `steps` an epoch; empty ones and large ones occur.

    first: called at the start of an epoch, the number of its first draw since training began. Skipping batches of an
        epoch after a resume therefore leads to the very draws that come next.
    stop: the number of the first draw beyond the plan, which is never made.
    """

    stop = 1 << 62

    def __init__(
        self, rows: int, rate: float, randomness: Randomness, *, first: Callable[[], int], processes: int = 1
    ) -> None:
        self.rows, self.rate, self.processes = rows, rate, processes
        self.steps = max(1, round(1 / rate))
        self.randomness, self._first = randomness, first

    @property
    def expected(self) -> float:
        """Rows that a step draws on average, over all processes."""
        return self.rate * self.rows

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        first = self._first()
        for number in range(first, min(first + self.steps, self.stop)):
            yield self.draw(number)

    def draw(self, number: int) -> list[int]:
        """The rows of one step from this process's share."""
        rank, generator = self.randomness.rank, self.randomness.generator("sample", number)
        share = len(range(rank, self.rows, self.processes))
        # a Binomial number of rows, all sets of that size alike: the same as one coin a row, without N coins
        count = int(generator.binomial(share, self.rate)) if share else 0
        chosen = generator.choice(share, count, replace=False, shuffle=False).tolist() if count else []
        return [rank + self.processes * place for place in sorted(chosen)]
