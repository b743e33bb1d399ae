"""`opake bench memory`: what a step of per-example gradients keeps, by part of the model, and how large it may be.

On CUDA a peak is what torch allocated, weights included; on a CPU it is the live bytes of the tensors that the step
made. One process, one way after the other, each with a model of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from opake.functional import clipped_grad
from opake.testing.live import peak_live_bytes

from .memory_model import GRADIENTS, WAYS, Sizes, batch, build, floor, forget, trainable
from .memory_trace import MemoryTrace

__all__ = ["WAYS", "Kept", "Peak", "curve", "kept", "largest", "least", "peak"]

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes of one part: kept by the forward, alive at the peak, and the floor (None: not part of it)."""

    part: str
    kept: int
    at_peak: int
    floor: int | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Peak:
    """Peak bytes of one way at one size, `resting` of them there before the step; `error` says why there is none."""

    way: str
    rows: int
    tokens: int
    peak: int | None
    resting: int = 0
    engine: str = ""
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class _Step:
    """One step of a way, ready to be run and measured."""

    def __init__(self, sizes: Sizes, way: str, rows: int, device: str, engine: str) -> None:
        self.model = build(sizes, way, device)
        self.params, self.rows = trainable(self.model), batch(sizes, rows, device)
        self.run = clipped_grad(self.model, clip_norm=1.0, engine=engine, capture=False)
        self.engine = ""

    def __call__(self) -> Any:
        result = self.run(self.params, **self.rows)
        self.engine = result.engine
        return result


def kept(sizes: Sizes, way: str, device: str, engine: str = "auto") -> list[Kept]:
    """What a step keeps by part of the model, largest first, after one step that nothing is asked of."""
    step = _Step(sizes, way, sizes.rows, device, engine)
    step()
    with MemoryTrace(step.model) as trace:
        result = step()
    del result
    floors = floor(sizes, sizes.rows, step.model, remat=way == "remat")
    parts = sorted({*trace.kept, *trace.at_peak, *floors}, key=lambda part: -trace.at_peak[part])
    return [Kept(part, trace.kept[part], trace.at_peak[part], floors.get(part)) for part in parts]


def least(found: Sequence[Kept]) -> int:
    """The floor of the whole step. Activations go as gradients come, so a peak need only hold the larger of the two."""
    gradients = sum(each.floor or 0 for each in found if each.part == GRADIENTS)
    return max(gradients, sum(each.floor or 0 for each in found) - gradients)


def peak(sizes: Sizes, way: str, rows: int, device: str, engine: str = "auto") -> Peak:
    """The peak of a step of `rows` rows."""
    forget(device)
    try:
        step = _Step(sizes, way, rows, device, engine)
        step()
        forget(device)
        if device != "cuda":
            return Peak(way, rows, sizes.tokens, peak_live_bytes(step), 0, step.engine)
        resting = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return Peak(way, rows, sizes.tokens, torch.cuda.max_memory_allocated(), resting, step.engine)
    except torch.OutOfMemoryError as error:
        # too large is a result
        return Peak(way, rows, sizes.tokens, None, error=str(error).partition(".")[0])


def curve(
    sizes: Sizes, lengths: Sequence[int], ways: Sequence[str], device: str, engine: str = "auto"
) -> Iterator[Peak]:
    """Peaks over sequence lengths, one way after the other."""
    for way in ways:
        for tokens in lengths:
            yield peak(Sizes(sizes.config, sizes.rows, tokens, sizes.rank), way, sizes.rows, device, engine)


def largest(peaks: Sequence[Peak], budget: float) -> int | None:
    """The most rows that fit `budget` bytes, by the line through two peaks of one way; None if not even one does.

    Memory is linear in the rows of a microbatch: per row the activations and the gradients, besides them the weights.
    """
    (a, b) = sorted(peaks, key=lambda each: each.rows)
    if a.peak is None or b.peak is None or a.rows == b.rows:
        return None
    slope = (b.peak - a.peak) / (b.rows - a.rows)
    rows = math.inf if slope <= 0 else math.floor((budget - a.peak) / slope + a.rows + 1e-9)
    return int(rows) if 1 <= rows < math.inf else None
