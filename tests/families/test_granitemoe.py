"""Granite MoE: scaled residuals and logits."""

from __future__ import annotations

from opake.testing import MoESuite


class TestGraniteMoe(MoESuite):
    model_type = "granitemoe"
