"""OLMoE: every layer is sparse."""

from __future__ import annotations

from opake.testing import MoESuite


class TestOlmoe(MoESuite):
    model_type = "olmoe"
