"""Epsilon against an independent implementation, its monotonicity, calibration, and the history."""

from __future__ import annotations

import math

import pytest
from opacus.accountants import PRVAccountant, RDPAccountant

from opake.errors import InputError
from opake.trainer.accounting import History, Phase, PLDAccountant, noise_for

ACCOUNTANT = PLDAccountant()
CASES = [(0.01, 1.0, 1000, 1e-5), (0.05, 0.8, 30, 1e-4), (0.001, 0.7, 5000, 1e-6), (0.2, 4.0, 100, 1e-5)]


def opacus(kind, phases, delta, **options) -> float:
    accountant = kind()
    accountant.history = [(phase.noise_multiplier, phase.sampling_rate, phase.steps) for phase in phases]
    return accountant.get_epsilon(delta=delta, **options)


@pytest.mark.parametrize(("rate", "noise", "steps", "delta"), CASES)
def test_epsilon_agrees_with_opacus(rate, noise, steps, delta) -> None:
    phases = [Phase(rate, noise, steps)]
    ours = ACCOUNTANT.epsilon(phases, delta)
    # an upper bound that is looser, and one that carries its own error of at most 0.01
    assert ours <= opacus(RDPAccountant, phases, delta)
    assert ours == pytest.approx(opacus(PRVAccountant, phases, delta, eps_error=0.01), abs=0.02)


def test_several_phases_agree_with_opacus() -> None:
    phases = [Phase(0.01, 1.0, 300), Phase(0.02, 1.5, 200)]
    ours = ACCOUNTANT.epsilon(phases, 1e-5)
    assert ours == pytest.approx(opacus(PRVAccountant, phases, 1e-5, eps_error=0.01), abs=0.02)
    assert ACCOUNTANT.epsilon([Phase(0.01, 1.0, 100), Phase(0.01, 1.0, 200), phases[1]], 1e-5) == pytest.approx(ours)


def test_a_single_step_is_the_gaussian_mechanism() -> None:
    """Balle and Wang 2018, theorem 8: the exact delta of one Gaussian step."""
    from scipy.stats import norm

    epsilon = ACCOUNTANT.epsilon([Phase(1.0, 1.0, 1)], 1e-5)
    delta = norm.cdf(0.5 - epsilon) - math.exp(epsilon) * norm.cdf(-0.5 - epsilon)
    assert delta == pytest.approx(1e-5, rel=2e-3)
    assert delta <= 1e-5, "rounding must be upward"


def test_epsilon_grows_with_steps_and_falls_with_noise() -> None:
    by_steps = [ACCOUNTANT.epsilon([Phase(0.01, 1.0, steps)], 1e-5) for steps in (0, 1, 10, 100)]
    by_noise = [ACCOUNTANT.epsilon([Phase(0.01, noise, 100)], 1e-5) for noise in (4.0, 1.0, 0.5, 0.05)]
    assert by_steps == sorted(by_steps)
    assert by_steps[0] == 0 < by_steps[1]
    assert by_noise == sorted(by_noise)
    assert math.isinf(ACCOUNTANT.epsilon([Phase(0.01, 1.0, 10), Phase(0.01, 0.0, 1)], 1e-5))


@pytest.mark.parametrize("target", [0.5, 3.0, 8.0])
def test_calibration_reaches_its_target_and_not_more(target) -> None:
    noise = noise_for(target, 1e-5, 0.02, 200, ACCOUNTANT)
    assert ACCOUNTANT.epsilon([Phase(0.02, noise, 200)], 1e-5) <= target
    assert ACCOUNTANT.epsilon([Phase(0.02, noise * 0.995, 200)], 1e-5) > target


def test_a_target_that_no_noise_reaches() -> None:
    class Endless:
        name = "endless"

        def epsilon(self, phases, delta):
            return math.inf

    with pytest.raises(InputError, match=r"no noise keeps 5 steps within epsilon 1\.0 at delta 1e-05"):
        noise_for(1.0, 1e-5, 0.1, 5, Endless())


def test_a_history_joins_equal_phases_and_survives_json() -> None:
    history = History()
    for noise in (1.0, 1.0, 2.0, 1.0):
        history.add(0.1, noise)
    assert history.phases == (Phase(0.1, 1.0, 2), Phase(0.1, 2.0, 1), Phase(0.1, 1.0, 1))
    assert history.steps == 4
    assert History.from_json([phase._asdict() for phase in history.phases]).phases == history.phases


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        [{"steps": 3}],
        [{"sampling_rate": 0.1, "noise_multiplier": 1.0, "steps": -3}],
        [{"sampling_rate": 0.0, "noise_multiplier": 1.0, "steps": 3}],
        [{"sampling_rate": "x", "noise_multiplier": 1.0, "steps": 3}],
    ],
)
def test_what_is_no_history_is_refused(value) -> None:
    if value == {}:
        assert History.from_json(value).steps == 0
        return
    with pytest.raises(InputError, match="no privacy history"):
        History.from_json(value)
