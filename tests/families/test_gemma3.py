"""Gemma 3 for text, and the model of text and images used for text."""

from __future__ import annotations

from opake.testing import FamilySuite


class TestGemma3Text(FamilySuite):
    model_type = "gemma3_text"


class TestGemma3Bidirectional(FamilySuite):
    model_type = "gemma3_text"
    config = {"use_bidirectional_attention": True}


class TestGemma3SoftCap(FamilySuite):
    model_type = "gemma3_text"
    attentions = ("eager",)
    config = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}


class TestGemma3(FamilySuite):
    model_type = "gemma3"
