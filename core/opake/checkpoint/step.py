"""Whether the code at hand is part of a step that computes per-example gradients.

Inside a transform the answer is plain. The batched engine has no transform and says so for the time of its step; what
it rematerialises runs again in the threads of the backward, which know nothing of that, so `Replay` tells them.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

from opake.transforms import inside_transform

_batched = contextvars.ContextVar("opake_batched_step", default=False)


def inside_step() -> bool:
    """Whether per-example gradients are being computed: inside a transform, or in a step of the batched engine."""
    return inside_transform() or _batched.get()


def in_batched_step() -> bool:
    """Whether a step of the batched engine runs."""
    return _batched.get()


@contextlib.contextmanager
def batched_step(on: bool = True) -> Iterator[None]:
    """For the time of the block, a step of the batched engine runs (or does not)."""
    token = _batched.set(on)
    try:
        yield
    finally:
        _batched.reset(token)
