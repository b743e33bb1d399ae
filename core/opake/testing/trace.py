"""The sequence of operators that a piece of code runs, to compare two batches of one shape.

If the sequences differ, something in the batch's contents chose a code path, and so one row can reach another. The
comparison finds it even where the numbers happen to agree. It sees operators, not what a kernel does inside.
"""

# ruff: noqa: TID253
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OperatorTrace(TorchDispatchMode):
    """`with OperatorTrace() as trace: ...`, then `trace.steps`: operators with the shapes and dtypes they returned."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        shapes = [f"{tuple(t.shape)}:{t.dtype}" for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.steps.append(f"{func} -> {', '.join(shapes)}")
        return out


def operator_trace(fn: Callable[[], Any]) -> list[str]:
    """The operators that `fn()` runs, in order, with the shapes and dtypes they return."""
    with OperatorTrace() as trace:
        fn()
    return trace.steps


def first_difference(one: list[str], other: list[str]) -> str | None:
    """Where two traces part, in words; None if they are equal."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return f"step {index}: {a!r} against {b!r}"
    if len(one) != len(other):
        return f"{len(one)} operators against {len(other)}"
    return None
