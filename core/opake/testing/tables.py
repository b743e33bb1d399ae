"""Rotary tables that a forward changes, taken back before every forward: so that a model is as good as new each time.

Stock models with `dynamic` or `longrope` tables remember the longest sequence they saw, so their answer depends on what
ran before. To compare two of them, each call must start from the same state: that of a fresh model.
"""

# ruff: noqa: TID253
from __future__ import annotations

from typing import Any

import torch

from opake.batching import rotary

NUMBERS = ("max_seq_len_cached", "attention_scaling")


class FreshTables:
    """A forward pre-hook for a model; it also may be called by hand. A deep copy of the model has its own."""

    def __init__(self, model: torch.nn.Module) -> None:
        modules = [module for module in model.modules() if rotary.updates(module)]
        self.states = [(module, _state(module), dict(module._buffers)) for module in modules]

    def __call__(self, *_: Any) -> None:
        for module, attributes, buffers in self.states:
            for key in _state(module).keys() - attributes.keys():
                del vars(module)[key]
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


def _state(module: torch.nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if key.endswith(("inv_freq", *NUMBERS))}


def keep_fresh(model: torch.nn.Module) -> None:
    """Let every forward of `model` start with the tables that it has now; nothing where no table changes."""
    tables = FreshTables(model)
    if tables.states:
        model.register_forward_pre_hook(tables)


def refresh(model: torch.nn.Module) -> None:
    """Put the tables back that `keep_fresh` found."""
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, FreshTables):
            hook()
