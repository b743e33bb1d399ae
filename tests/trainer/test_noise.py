"""Proof (a): a step without rows is noise alone, of the right size, new at every step and for every parameter."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from opake.trainer.randomness import Randomness

from .subjects import Gradients, trainer, weights

STEPS, NOISE, CLIP, RATE = 250, 1.5, 0.25, 1e-6


def noise_alone(folder, **options) -> tuple[torch.Tensor, float]:
    """(steps, parameters) of gradients without rows, in units of sigma * C / L; how often rows were drawn."""
    gradients = Gradients()
    settings = {"noise_multiplier": NOISE, "per_example_clip_norm": CLIP, "sampling_rate": RATE, "max_steps": STEPS}
    it = trainer(folder, callbacks=[gradients], learning_rate=0.0, **{**settings, **options})
    it.train()
    assert not it.engines, "a row was drawn"
    assert it.history.steps == len(gradients.seen)
    return gradients.stacked() * it.sampler.expected / (NOISE * CLIP), it.epsilon()


@pytest.fixture(scope="module")
def seeded(tmp_path_factory) -> torch.Tensor:
    return noise_alone(tmp_path_factory.mktemp("seeded"), noise_seed=5)[0]


def test_mean_and_standard_deviation(seeded) -> None:
    count = seeded.numel()
    assert abs(float(seeded.mean())) < 3 / math.sqrt(count)
    assert float(seeded.std()) == pytest.approx(1, abs=3 / math.sqrt(2 * count))
    assert stats.kstest(seeded.flatten().numpy(), "norm").pvalue > 1e-3


def test_every_parameter_and_every_step_has_noise_of_its_own(seeded) -> None:
    steps, parameters = seeded.shape
    assert seeded.unique().numel() > 0.999 * seeded.numel()
    for along, count in ((0, steps), (1, parameters)):
        scale = seeded.std(along)
        assert (scale - 1).abs().max() < 5 / math.sqrt(2 * count)
    following = float((seeded[1:] * seeded[:-1]).mean())
    neighbouring = float((seeded[:, 1:] * seeded[:, :-1]).mean())
    assert abs(following) < 3 / math.sqrt(seeded[1:].numel())
    assert abs(neighbouring) < 3 / math.sqrt(seeded[:, 1:].numel())


def test_noise_from_the_operating_system_is_new_in_every_run_and_as_large(tmp_path) -> None:
    one, other = (noise_alone(tmp_path / name, max_steps=60)[0] for name in "ab")
    assert not torch.isclose(one, other).any(0).all()
    assert abs(float((one * other).mean())) < 5 / math.sqrt(one.numel())
    for found in (one, other):
        assert float(found.std()) == pytest.approx(1, abs=5 / math.sqrt(2 * found.numel()))


def test_a_seed_repeats_a_run_and_another_seed_does_not(tmp_path, seeded) -> None:
    again = noise_alone(tmp_path / "again", noise_seed=5, max_steps=20)[0]
    other = noise_alone(tmp_path / "other", noise_seed=6, max_steps=20)[0]
    assert torch.equal(again, seeded[:20])
    assert not torch.isclose(other, seeded[:20]).all(1).any()


def test_a_second_training_does_not_repeat_the_noise_of_the_first(tmp_path) -> None:
    gradients = Gradients()
    it = trainer(tmp_path, callbacks=[gradients], sampling_rate=RATE, noise_seed=5, max_steps=5)
    it.train()
    it.train()
    assert it.history.steps == 10
    assert gradients.stacked().unique(dim=0).shape[0] == 10


def test_the_global_generator_says_nothing_about_the_noise(tmp_path) -> None:
    def run(folder):
        return noise_alone(folder, max_steps=2, seed=42)[0]

    assert not torch.isclose(run(tmp_path / "a"), run(tmp_path / "b")).any(1).all()


def test_the_last_step_moves_the_weights_by_noise_alone(tmp_path) -> None:
    it = trainer(tmp_path, sampling_rate=RATE, max_steps=3, learning_rate=1e-9)
    before = weights(it.model)
    it.train()
    assert not torch.equal(weights(it.model), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_has_the_precision_of_the_gradient(dtype) -> None:
    flat = torch.zeros(4000, dtype=dtype)
    Randomness(1).add_normal([flat], 2.0, 0)
    assert flat.dtype == dtype
    assert float(flat.std()) == pytest.approx(2, abs=2 * 3 / math.sqrt(8000))
    assert bool((flat != flat.float().double()).any()) == (dtype == torch.float64)
