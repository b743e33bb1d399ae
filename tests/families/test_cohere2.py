"""Command R7B: only sliding layers rotate."""

from __future__ import annotations

from opake.testing import FamilySuite


class TestCohere2(FamilySuite):
    model_type = "cohere2"
