"""Gemma 2: its reference is the stock model with eager attention, the only one in which stock honours the soft cap."""

from __future__ import annotations

from opake.testing import FamilySuite


class TestGemma2(FamilySuite):
    model_type = "gemma2"
    attentions = ("eager",)
