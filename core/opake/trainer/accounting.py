"""What has been spent: the history of noisy steps, and the epsilon that follows from it.

The mechanism is DP-SGD with Poisson sampling (Abadi et al. 2016), composed through privacy loss distributions (Koskela
et al. 2020; Doroshenko et al. 2022, "Connect the Dots") by Google's dp-accounting. Neighbouring data sets differ by one
row, added or removed. Every rounding is upward, so the epsilon is a bound. Nothing here draws or sees data.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NamedTuple, Protocol

from opake.errors import InputError, MissingDependency

# width of a bucket of the discretised loss, how many there may be, and the powers of 1.001 that noise is chosen from
INTERVAL, MOST_BUCKETS, POWERS = 1e-3, 100_000, range(-9_200, 11_500)


class Phase(NamedTuple):
    """`steps` steps in a row with the same sampling rate and noise multiplier."""

    sampling_rate: float
    noise_multiplier: float
    steps: int


@dataclass
class History:
    """All steps that have been made, in order; plain numbers, so that a checkpoint holds them as JSON.

    test_only: the noise of some of them had a public seed. logged_without_noise: some of them had statistics logged.
    """

    phases: tuple[Phase, ...] = ()
    test_only: bool = False
    logged_without_noise: bool = False

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def add(self, sampling_rate: float, noise_multiplier: float, steps: int = 1) -> None:
        """Count steps; an empty batch counts like any other."""
        before = self.phases
        if before and before[-1][:2] == (sampling_rate, noise_multiplier):
            before, steps = before[:-1], steps + before[-1].steps
        self.phases = (*before, Phase(sampling_rate, noise_multiplier, steps))

    @classmethod
    def from_json(cls, value: Any, **marks: bool) -> History:
        """Raises InputError unless `value` is a list of phases, each an object."""
        try:
            phases = tuple(Phase(**entry) for entry in value)
            if all(0 < q <= 1 and sigma >= 0 and steps == int(steps) > 0 for q, sigma, steps in phases):
                return cls(phases, **marks)
        except (TypeError, ValueError):
            pass
        raise InputError(f"no privacy history: {value!r:.200}; it is a list of {', '.join(Phase._fields)}")


class Accountant(Protocol):
    """Turns a history into epsilon; an upper bound, never an estimate."""

    name: str

    def epsilon(self, phases: Sequence[Phase], delta: float) -> float: ...


class PLDAccountant:
    """Accounting by privacy loss distributions; needs the extra `opake[dp]`, else MissingDependency."""

    def __init__(self) -> None:
        _distributions()
        self.name = f"PLD (dp-accounting {metadata.version('dp-accounting')})"

    def epsilon(self, phases: Sequence[Phase], delta: float) -> float:
        """The smallest epsilon known for this delta; 0 without steps, infinite without noise."""
        made = [phase for phase in phases if phase.steps]
        if not made or any(phase.noise_multiplier == 0 for phase in made):
            return math.inf if made else 0.0
        return _composed(tuple(made), delta)


def noise_for(target: float, delta: float, rate: float, steps: int, accountant: Accountant) -> float:
    """The smallest noise multiplier, to a thousandth, with which `steps` steps stay within epsilon `target`.

    Raises InputError where no noise suffices.
    """

    def suffices(power: int) -> bool:
        return accountant.epsilon([Phase(rate, 1.001**power, steps)], delta) <= target

    enough = bisect.bisect_left(POWERS, True, key=suffices)
    if enough == len(POWERS):
        raise InputError(f"no noise keeps {steps} steps within epsilon {target} at delta {delta}; raise target_delta")
    return 1.001 ** POWERS[enough]


def _distributions() -> Any:
    try:
        from dp_accounting.pld import privacy_loss_distribution
    except ImportError as error:
        raise MissingDependency(f"accounting needs dp-accounting ({error}); pip install 'opake[dp]'") from error
    return privacy_loss_distribution


def _interval(noise_multiplier: float) -> float:
    """Wider buckets where so little noise makes losses so large."""
    widest = 0.5 / noise_multiplier**2 + 10 / noise_multiplier
    return INTERVAL * 2 ** max(0, math.ceil(math.log2(widest / MOST_BUCKETS / INTERVAL)))


@functools.lru_cache(maxsize=64)
def _composed(phases: tuple[Phase, ...], delta: float) -> float:
    interval = max(_interval(phase.noise_multiplier) for phase in phases)
    losses = [_one_step(q, sigma, interval).self_compose(steps) for q, sigma, steps in phases]
    return float(functools.reduce(lambda a, b: a.compose(b), losses).get_epsilon_for_delta(delta))


@functools.lru_cache(maxsize=8)
def _one_step(rate: float, noise_multiplier: float, interval: float) -> Any:
    make = _distributions().from_gaussian_mechanism
    return make(noise_multiplier, sampling_prob=rate, value_discretization_interval=interval)
