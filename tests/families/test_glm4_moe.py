"""GLM-4 MoE: a dense layer first."""

from __future__ import annotations

from opake.testing import MoESuite


class TestGlm4Moe(MoESuite):
    model_type = "glm4_moe"
    # the router computes in float32
    dtypes = ("fp32", "bf16")
