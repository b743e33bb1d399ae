"""A family plugin written by looking at the model: what its classes compute is measured on a tiny random one.

`survey` finds what could be declared, `proof` keeps what is right, `write` lays a distribution out. Importing this
package imports nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .new import Scaffold, new_family

__all__ = ["Scaffold", "new_family"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import new

        return getattr(new, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
