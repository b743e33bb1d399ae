"""Mixtral: stacked experts in every layer."""

from __future__ import annotations

from opake.testing import MoESuite


class TestMixtral(MoESuite):
    model_type = "mixtral"
