"""Proof (g): two processes are one in distribution - the mean exactly, the noise once in effect, the weights equal."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from .subjects import Gradients, trainer, weights

SCRIPT = Path(__file__).with_name("two_processes.py")
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
    ),
]


@pytest.fixture(scope="module", params=DEVICES)
def two(request, tmp_path_factory) -> tuple[Path, list[dict[str, torch.Tensor]]]:
    folder = tmp_path_factory.mktemp("two")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, SCRIPT, folder, request.param], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, [load_file(folder / f"{rank}.safetensors") for rank in range(2)]


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> dict[str, torch.Tensor]:
    drawn = Gradients()
    exact = {"noise_multiplier": 0.0, "per_example_clip_norm": float("inf"), "learning_rate": 0.1}
    full = trainer(tmp_path_factory.mktemp("one"), callbacks=[drawn], sampling_rate=1.0, max_steps=3, **exact)
    full.train()
    return {"full": weights(full.model), "gradient": drawn.stacked()}


@pytest.mark.parametrize("name", ["full", "gradient", "noise", "after_noise", "mixed", "batch_size"])
def test_processes_agree_to_the_bit(two, name) -> None:
    first, second = two[1]
    assert torch.equal(first[name], second[name])


@pytest.mark.parametrize("name", ["full", "gradient"])
def test_the_mean_gradient_is_that_of_one_process(two, one, name) -> None:
    torch.testing.assert_close(two[1][0][name], one[name], rtol=1e-5, atol=1e-6)


def test_noise_is_added_once_in_effect(two) -> None:
    noise = two[1][0]["noise"]
    assert noise.shape[0] == 200
    # 5 standard errors, for the noise is from the operating system; noise of both would be 1.41 times as large
    assert float(noise.std()) == pytest.approx(1, abs=5 / math.sqrt(2 * noise.numel()))
    assert abs(float(noise.mean())) < 5 / math.sqrt(noise.numel())


def test_each_process_draws_its_share(two) -> None:
    first, second = two[1]
    together = (first["share"] + second["share"]).sum()
    assert int(together) == int(first["batch_size"][1])
    assert not torch.equal(first["share"], second["share"])
    # 12 rows each, drawn with probability 1/4
    for share in (first["share"], second["share"]):
        assert int(share.max()) <= 12
        assert float(share.float().mean()) == pytest.approx(3, abs=4 * math.sqrt(12 / 4 * 3 / 4 / 30))


def test_epsilon_is_that_of_one_process_and_the_card_is_written_once(two) -> None:
    folder, (first, second) = two
    assert torch.equal(first["epsilon"], second["epsilon"])
    epsilon, steps, processes = first["epsilon"].tolist()
    assert (steps, processes) == (30, 2)
    card = json.loads((folder / "mixed" / "privacy.json").read_text())
    assert (card["epsilon"], card["processes"]) == (epsilon, 2)
    alone = trainer(folder / "alone")
    alone.history.add(alone.sampler.rate, 1.0, 30)
    assert alone.epsilon() == epsilon
