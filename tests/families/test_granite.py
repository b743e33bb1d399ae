"""Granite: a multiplier on everything; the tiny ones are not 1."""

from __future__ import annotations

from opake.testing import FamilySuite


class TestGranite(FamilySuite):
    model_type = "granite"
    config = {
        "residual_multiplier": 0.7,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "logits_scaling": 1.5,
        "mlp_bias": True,
    }
