"""Command R: parallel blocks, interleaved rotation."""

from __future__ import annotations

from opake.testing import FamilySuite


class TestCohere(FamilySuite):
    model_type = "cohere"


class TestCohereQKNorm(FamilySuite):
    model_type = "cohere"
    config = {"use_qk_norm": True, "logit_scale": 0.3}
