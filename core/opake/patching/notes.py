"""Run-time fall-backs: a patched module notes on itself why it took a plainer path, and the report collects the notes.

The notes live on the module, so a deep copy has its own and nothing is global. Only counts and reasons are kept, never
a value of a tensor.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from .report import Fallback

if TYPE_CHECKING:
    from torch import nn

_KEY = "_opake_notes"


def note(module: Any, reason: str) -> None:
    """Count one fall-back of `module` for `reason`."""
    vars(module).setdefault(_KEY, Counter())[reason] += 1


def collect(model: nn.Module) -> tuple[Fallback, ...]:
    """All notes of a model and its submodules, in module order."""
    return tuple(
        Fallback(name or type(model).__name__, reason, count)
        for name, module in model.named_modules()
        for reason, count in vars(module).get(_KEY, {}).items()
    )


def clear(model: nn.Module) -> None:
    """Forget the notes of a model and its submodules."""
    for module in model.modules():
        vars(module).pop(_KEY, None)
