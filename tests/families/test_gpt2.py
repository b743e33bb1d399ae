"""GPT-2, with and without its options of scaling."""

from __future__ import annotations

from opake.testing import FamilySuite


class TestGPT2(FamilySuite):
    model_type = "gpt2"


class TestGPT2Scaled(FamilySuite):
    model_type = "gpt2"
    config = {"scale_attn_by_inverse_layer_idx": True, "activation_function": "relu"}
