"""Gemma 3 for text, and the model of text and images used for text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Gemma3ForConditionalGeneration
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from opake import hf
from opake.batching.masked_loss import selects_tokens
from opake.checking.tiny import tiny_batch, tiny_model
from opake.patches import apply_model_patches
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
SELECTS = {
    "plain_operators_do_not_depend_on_padding": "stock computes this loss over the tokens of the mask (not under vmap)"
}
WITHOUT = SELECTS if selects_tokens(Gemma3ForConditionalGeneration) else {}


class TestGemma3(FamilySuite):
    model_type = "gemma3"
    config = IMAGE
    without = WITHOUT


class TestGemma3ImageBlocks(FamilySuite):
    """Tokens of one image see each other: a function that is or-ed with the causal mask, and-ed with the window."""

    model_type = "gemma3"
    config = IMAGE
    without = WITHOUT
    causal = False

    @classmethod
    def inputs(cls, rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kinds = torch.zeros_like(rows["input_ids"])
        kinds[:, 3:6] = 1
        return {**rows, "token_type_ids": kinds}


@pytest.mark.parametrize("builder", [create_causal_mask, create_sliding_window_causal_mask])
@pytest.mark.parametrize("padding", ["right", "left"])
def test_mask_functions_compose_under_vmap(builder: Callable[..., torch.Tensor], padding: str) -> None:
    """A mask is (causal or `or_mask_function`) and `and_mask_function` and padding, as without opake."""
    stock, model = tiny_model("gemma3_text"), tiny_model("gemma3_text")
    apply_model_patches(model)
    mask, embeds = tiny_batch(padding=padding)["attention_mask"], torch.zeros(3, 12, 32)
    cache = {next(name for name in hf.CACHE_KEYWORDS if hf.accepts(builder, name)): None}

    def build(config: Any, mask: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        return builder(
            config=config,
            inputs_embeds=embeds,
            attention_mask=mask,
            position_ids=None,
            or_mask_function=lambda batch, head, q, k: k < 3,
            and_mask_function=lambda batch, head, q, k: (q + k) % 5 != 0,
            **cache,
        )

    want = build(stock.config, mask, embeds)
    got = torch.func.vmap(lambda m, e: build(model.config, m[None], e[None])[0])(mask, embeds)
    assert want.dtype == torch.bool
    assert torch.equal(got, want)
