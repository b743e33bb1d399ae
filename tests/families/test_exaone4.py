"""EXAONE 4: hybrid, and the small model in which every layer is full and rotates."""

from __future__ import annotations

from opake.testing import FamilySuite


class TestExaone4(FamilySuite):
    model_type = "exaone4"


class TestExaone4Full(FamilySuite):
    model_type = "exaone4"
    config = {
        "sliding_window": None,
        "sliding_window_pattern": None,
        "layer_types": ["full_attention", "full_attention"],
    }
