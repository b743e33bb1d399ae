"""Granite MoE: scaled residuals and logits."""

from __future__ import annotations

from opake.testing import MoESuite


class TestGraniteMoe(MoESuite):
    model_type = "granitemoe"

    @classmethod
    def settle(cls, model):
        # choices so clear that no rounding in bfloat16 makes another
        for name, parameter in model.named_parameters():
            if name.endswith("router.weight"):
                parameter.data.mul_(4)
