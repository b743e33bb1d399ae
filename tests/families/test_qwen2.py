"""Qwen2, with and without sliding layers."""

from __future__ import annotations

from opake.testing import FamilySuite


class TestQwen2(FamilySuite):
    model_type = "qwen2"


class TestQwen2Sliding(FamilySuite):
    model_type = "qwen2"
    config = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 6, "layer_types": None}
