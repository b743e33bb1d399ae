"""GLM-4: interleaved rotation of half a head, combined gate and up."""

from __future__ import annotations

from opake.testing import FamilySuite


class TestGlm4(FamilySuite):
    model_type = "glm4"


class TestGlm4WithoutBias(FamilySuite):
    model_type = "glm4"
    config = {"attention_bias": False}
