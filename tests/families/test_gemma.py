"""Gemma: offset norms and scaled embeddings."""

from __future__ import annotations

from opake.testing import FamilySuite


class TestGemma(FamilySuite):
    model_type = "gemma"
