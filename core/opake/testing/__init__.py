"""Helpers for those who write or test family plugins; opt-in, nothing here is imported by the library itself.

As a pytest plugin (`pytest_plugins = "opake.testing"` in the top conftest.py) it gives the fixtures that `FamilySuite`
needs, spreads its cases over the attention implementations and the grid of cells, and prints which part of the grid a
run takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._pytest import bench, pytest_collection_modifyitems, pytest_configure, pytest_generate_tests, pytest_report_header

if TYPE_CHECKING:
    from .suite import FamilySuite, GenericSuite, ModelSuite, MoESuite

__all__ = [
    "FamilySuite",
    "GenericSuite",
    "MoESuite",
    "ModelSuite",
    "bench",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_generate_tests",
    "pytest_report_header",
]


def __getattr__(name: str) -> Any:
    # the suite needs torch, the other helpers do not
    if name in ("FamilySuite", "GenericSuite", "MoESuite", "ModelSuite"):
        from . import suite

        return getattr(suite, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
