"""Gradient checkpointing switched on and off under whatever name the installed Transformers has for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def checkpointing(model: Any, on: bool = True) -> Iterator[None]:
    """Checkpoint the activations of a Transformers or PEFT model for the length of the block, if `on`."""
    if not on:
        yield
        return
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{kind}_checkpointing_enable")()
    try:
        yield
    finally:
        getattr(model, f"{kind}_checkpointing_disable")()
