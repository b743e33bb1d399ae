"""Proof (f): what an auditor can show about the trainer from outside stays under the epsilon that it reports.

Every canary is a row whose gradient is a coordinate of its own, the worst case that clipping allows; of 1000, half are
put into each run by a coin. From the weights alone the auditor guesses who was in. Rates of right and wrong guesses,
bounded by Clopper-Pearson at 95 %, bound epsilon from below (Jagielski et al. 2020, "Auditing Differentially Private
Machine Learning"; coordinates are independent, so canaries are independent trials). Without noise the same auditor must
get above the reported epsilon, else it would prove nothing.
"""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import beta
from torch import nn

from opake.trainer.accounting import PLDAccountant, noise_for
from opake.trainer.randomness import Randomness

from .subjects import trainer

pytestmark = pytest.mark.slow

CANARIES, RUNS, STEPS, RATE, DELTA = 1000, 60, 4, 0.5, 1e-5


class Canaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(CANARIES))

    def forward(self, number):
        return {"loss": -self.weight[number].mean()}


def run(folder, noise: float, coins: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(scores, membership, reported epsilon) of one training run."""
    inside = torch.rand(CANARIES, generator=coins) < 0.5
    data = [{"number": int(i)} for i in inside.nonzero()]
    plan = {"sampling_rate": RATE, "max_steps": STEPS, "noise_multiplier": noise, "target_delta": DELTA}
    rate = {"learning_rate": 1.0, "lr_scheduler_type": "constant", "microbatch_size": 256}
    it = trainer(folder, model=Canaries(), train_dataset=data, **plan, **rate)
    it.train()
    return it.model.weight.detach() * it.sampler.expected, inside, it.epsilon()


def lower_bound(scores: torch.Tensor, inside: torch.Tensor, threshold: float) -> float:
    """95 % lower bound on epsilon from the guess that scores above the threshold were in; 97.5 % for each rate."""
    yes = scores > threshold
    right, members = int((yes & inside).sum()), int(inside.sum())
    wrong, others = int((yes & ~inside).sum()), int((~inside).sum())
    lowest = beta.ppf(0.025, right, members - right + 1) if right else 0.0
    highest = beta.ppf(0.975, wrong + 1, others - wrong) if wrong < others else 1.0
    return math.log(max(lowest - DELTA, 1e-12) / highest)


def audited(folder, noise: float) -> tuple[float, float]:
    """(lower bound, reported epsilon); half of the runs choose the threshold, the other half are judged by it."""
    coins = torch.Generator().manual_seed(0)
    scores, inside, epsilons = zip(*(run(folder, noise, coins) for _ in range(RUNS)), strict=True)
    half = RUNS // 2
    first, second = ((torch.cat(scores[part]), torch.cat(inside[part])) for part in (slice(half), slice(half, None)))
    candidates = torch.quantile(first[0][: CANARIES * 15], torch.linspace(0.3, 0.999, 60)).tolist()
    best = max(candidates, key=lambda threshold: lower_bound(*first, threshold))
    assert len(set(epsilons)) == 1
    return lower_bound(*second, best), epsilons[0]


@pytest.fixture(scope="module", params=[1.0, 8.0])
def budget(request) -> tuple[float, float]:
    """(epsilon, noise multiplier)."""
    return request.param, noise_for(request.param, DELTA, RATE, STEPS, PLDAccountant())


def test_an_auditor_stays_under_the_reported_epsilon(tmp_path, budget) -> None:
    target, noise = budget
    bound, reported = audited(tmp_path, noise)
    print(f"epsilon {reported:.3f}: the auditor shows {bound:.3f}")
    assert 0.9 * target < reported <= target
    assert bound <= reported
    assert bound > 0.2 * reported, "an auditor that sees nothing proves nothing"


def test_the_auditor_finds_that_noise_is_missing(tmp_path, budget, monkeypatch) -> None:
    _, noise = budget
    monkeypatch.setattr(Randomness, "add_normal", lambda *given: None)
    bound, reported = audited(tmp_path, noise)
    print(f"epsilon {reported:.3f} reported without noise: the auditor shows {bound:.3f}")
    assert bound > reported
