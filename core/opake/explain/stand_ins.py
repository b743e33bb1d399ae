"""For the length of a count, attention and experts of a model that have shapes and no values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping
from functools import partial
from typing import Any

from opake import hf
from opake.batching import padding_check

from .attention import attention
from .experts import experts

NAME = "opake_outline"


@contextlib.contextmanager
def outlined(model: Any) -> Iterator[list[float]]:
    """Yields the list that the operations of the stand-ins are added to; the model is as before afterwards."""
    counted: list[float] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(_silenced(model))
        if hf.selects_attention(model):
            function = partial(attention, counted)
            stack.enter_context(_selected(model, "_attn_implementation", hf.attention_functions(), function))
        function = partial(experts, counted)
        stack.enter_context(_selected(model, "_experts_implementation", hf.experts_functions(), function))
        yield counted


@contextlib.contextmanager
def _silenced(model: Any) -> Iterator[None]:
    """Without the warning about padding, for which values are read."""
    checks = [module for module in model.modules() if padding_check.has_check(module)]
    for module in checks:
        vars(module)[padding_check.NAME] = lambda *_, **__: None
    try:
        yield
    finally:
        for module in checks:
            del vars(module)[padding_check.NAME]


@contextlib.contextmanager
def _selected(model: Any, setting: str, table: MutableMapping[str, Any], function: Any) -> Iterator[None]:
    """`function` under our name in a public table, and that name in every config that makes such a choice."""
    chosen = [(config, getattr(config, setting, None)) for config in hf.configs(model.config)]
    before = [(config, name) for config, name in chosen if name is not None]
    table[NAME] = function
    try:
        for config, _ in before:
            setattr(config, f"{setting}_internal", NAME)
        yield
    finally:
        for config, name in before:
            setattr(config, f"{setting}_internal", name)
        del table[NAME]
