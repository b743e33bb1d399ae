"""Gemma 3 for text, and the model of text and images used for text."""

from __future__ import annotations

import torch

from opake.testing import FamilySuite


class TestGemma3Text(FamilySuite):
    model_type = "gemma3_text"


class TestGemma3Bidirectional(FamilySuite):
    model_type = "gemma3_text"
    config = {"use_bidirectional_attention": True}
    causal = False


class TestGemma3SoftCap(FamilySuite):
    model_type = "gemma3_text"
    attentions = ("eager",)
    config = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}


# within the vocabulary, as in the checkpoints: outside of it the stock model writes where a mask says, which no
# transform can run
IMAGE = {"image_token_id": 90}


class TestGemma3(FamilySuite):
    model_type = "gemma3"
    config = IMAGE


class TestGemma3ImageBlocks(FamilySuite):
    """Tokens of one image see each other: a function that is or-ed with the causal mask, and-ed with the window."""

    model_type = "gemma3"
    config = IMAGE
    causal = False

    @classmethod
    def inputs(cls, rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kinds = torch.zeros_like(rows["input_ids"])
        kinds[:, 3:6] = 1
        return {**rows, "token_type_ids": kinds}
