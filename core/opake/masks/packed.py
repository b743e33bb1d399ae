"""Several sequences packed in one row, told apart by their positions, without looking at a value.

Positions that nobody supplied are counted by the model itself, one after the other, so a row of theirs is one sequence.
Stock reads them all the same: on a GPU every forward waits for the device, and a capture gets a mask it does not need.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import torch

_counted = contextvars.ContextVar("opake_counted_positions", default=False)


@contextlib.contextmanager
def counted_by_the_model(yes: bool) -> Iterator[None]:
    """For the time of the block, whether positions are the model's own."""
    token = _counted.set(yes)
    try:
        yield
    finally:
        _counted.reset(token)


def are_counted() -> bool:
    """Whether the positions that a mask is made for are the model's own."""
    return _counted.get()


def sequence_numbers(position_ids: torch.Tensor) -> torch.Tensor:
    """Which sequence of its row each token belongs to: position_ids (B, T) -> (B, T), 0 for the first.

    A sequence begins wherever a position does not follow the one before it.
    """
    before = torch.cat([position_ids[:, :1] - 1, position_ids[:, :-1]], dim=-1)
    return (position_ids - before != 1).cumsum(-1)
