"""OLMo 2: norms after the sublayers."""

from __future__ import annotations

from opake.testing import FamilySuite


class TestOlmo2(FamilySuite):
    model_type = "olmo2"


class TestOlmo2Biases(FamilySuite):
    model_type = "olmo2"
    config = {"attention_bias": True}
