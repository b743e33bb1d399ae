"""Ministral, with both kinds of layers."""

from __future__ import annotations

from opake.testing import FamilySuite


class TestMinistral(FamilySuite):
    model_type = "ministral"
    config = {"layer_types": ["sliding_attention", "full_attention"]}
