"""Mistral: the window of the tiny config is shorter than the sequence, so every layer slides."""

from __future__ import annotations

from opake.testing import FamilySuite


class TestMistral(FamilySuite):
    model_type = "mistral"


class TestMistralWithoutWindow(FamilySuite):
    model_type = "mistral"
    config = {"sliding_window": None, "head_dim": 16}
