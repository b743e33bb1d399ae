"""Mellum 2: sparse and dense layers, full and sliding."""

from __future__ import annotations

import pytest

from opake.testing import MoESuite

pytest.importorskip("transformers.models.mellum", reason="Mellum 2 came with Transformers 5.10")


class TestMellum(MoESuite):
    model_type = "mellum"
    config = {"mlp_layer_types": ["sparse", "dense"]}
