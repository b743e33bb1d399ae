"""What opake would do to a model, and what a step would cost, told from its config alone: no weights are loaded.

Importing this package imports nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .explanation import Explanation, explain

__all__ = ["Explanation", "explain"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import explanation

        return getattr(explanation, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
