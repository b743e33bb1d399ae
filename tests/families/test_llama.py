"""Llama and what is stored under its name."""

from __future__ import annotations

from opake.testing import FamilySuite


class TestLlama(FamilySuite):
    model_type = "llama"
