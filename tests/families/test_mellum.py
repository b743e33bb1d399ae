"""Mellum 2: sparse and dense layers, full and sliding."""

from __future__ import annotations

from opake.testing import MoESuite


class TestMellum(MoESuite):
    model_type = "mellum"
    config = {"mlp_layer_types": ["sparse", "dense"]}
