"""Qwen3, with and without sliding layers."""

from __future__ import annotations

from opake.testing import FamilySuite


class TestQwen3(FamilySuite):
    model_type = "qwen3"


class TestQwen3Sliding(FamilySuite):
    model_type = "qwen3"
    config = {
        "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "use_sliding_window": True,
    }
