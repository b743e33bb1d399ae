"""Where chance comes from: the operating system, or a public seed in tests.

Every step has generators of its own, so nothing has to be saved or replayed: an interrupted run goes on with fresh
entropy, and with a public seed the numbers are a function of the seed, the purpose, the step and the process. Each
generator starts from 128 bits (on a GPU 63) of the operating system. Neither PCG64 nor Philox is a cryptographic
generator, and rounding of the samples is not dealt with (Mironov 2012, "On Significance of the Least Significant Bits
for Differential Privacy"): an adversary who sees many exact gradients is out of scope.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

PURPOSES = {"sample": 0, "noise": 1}


class Randomness:
    """Generators for `purpose` and `step` of one process."""

    def __init__(self, seed: int | None = None, rank: int = 0) -> None:
        self.seed, self.rank = seed, rank

    def generator(self, purpose: str, step: int) -> np.random.Generator:
        """A new generator; without a seed no two are alike, whatever the arguments."""
        if self.seed is None:
            return np.random.default_rng()
        # SeedSequence takes no negative numbers
        return np.random.default_rng([PURPOSES[purpose], self.seed % (1 << 64), step, self.rank])

    def add_normal(self, flats: Iterable[torch.Tensor], std: float, step: int) -> None:
        """Add N(0, std**2) to every entry of each of `flats` (n,), drawn on its device."""
        source = self.generator("noise", step)
        for flat in flats:
            flat.add_(_normal(flat, source), alpha=std)


def _normal(like: torch.Tensor, source: np.random.Generator) -> torch.Tensor:
    if like.device.type == "cpu":
        kind = np.float64 if like.dtype == torch.float64 else np.float32
        return torch.from_numpy(source.standard_normal(like.shape[0], dtype=kind))
    there = torch.Generator(like.device).manual_seed(int(source.integers(1 << 63)))
    return torch.randn(like.shape, generator=there, device=like.device, dtype=like.dtype)
