"""The grid of situations in which per-example gradients are proven, and the part of it that one run takes.

A full grid is long, and a fixed part of it would prove the same easy cells for ever. So a run takes a part that covers
every pair of values of any two axes, drawn from the family's name and the ISO week: each family gets other cells than
its neighbour and than last week, and a run can be repeated by its name. The rest are marked `slow`.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import os
import random
from collections.abc import Sequence
from typing import NamedTuple

PART = "OPAKE_TEST_PART"


class Cell(NamedTuple):
    """One situation: how the model was loaded, what the batch looks like, and the state of the model.

    attention: the implementation that the model was loaded with. padding: `right`, `left` (the first real token is a
    label), `none` (no mask) or `ones` (a mask of ones). shape: a row comes as (T,) or (1, T). dtype: `fp32`, `bf16` or
    `fp64`. checkpointing: `keep` or `ckpt`. mode: `train` or `eval`.
    """

    attention: str
    padding: str
    shape: str
    dtype: str
    checkpointing: str
    mode: str

    def __str__(self) -> str:
        return "-".join(self)


PADDINGS = ("right", "left", "none", "ones")
SHAPES = ("T", "1xT")
DTYPES = ("fp32", "bf16", "fp64")
CHECKPOINTING = ("keep", "ckpt")
MODES = ("train", "eval")


def grid(attentions: Sequence[str], dtypes: Sequence[str] = DTYPES) -> list[Cell]:
    """Every cell of a family that can be loaded with these attention implementations and compared in these dtypes."""
    return [Cell(*values) for values in itertools.product(attentions, PADDINGS, SHAPES, dtypes, CHECKPOINTING, MODES)]


def part_name() -> str:
    """The name of this run's part: `OPAKE_TEST_PART`, or the ISO week such as `2026-W07`; `all` is the whole grid."""
    return os.environ.get(PART) or _week()


# asked once, so that a run across midnight on Sunday stays one run
@functools.cache
def _week() -> str:
    year, week, _ = datetime.datetime.now(datetime.UTC).isocalendar()
    return f"{year}-W{week:02}"


def chosen(name: str, cells: Sequence[Cell], part: str) -> set[Cell]:
    """The cells of `name` (a suite) in a part: few, and every pair of values of two axes is among them."""
    if part == "all":
        return set(cells)
    shuffled = sorted(cells)
    random.Random(f"{name} {part}").shuffle(shuffled)
    missing = set().union(*map(_pairs, cells))
    taken: set[Cell] = set()
    while missing:
        best = max(shuffled, key=lambda cell: len(_pairs(cell) & missing))
        taken.add(best)
        missing -= _pairs(best)
    return taken


@functools.cache
def _pairs(cell: Cell) -> frozenset[tuple[tuple[int, str], ...]]:
    return frozenset(itertools.combinations(enumerate(cell), 2))
