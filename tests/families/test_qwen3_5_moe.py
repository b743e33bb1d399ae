"""Qwen3.5-MoE, as a text model and as the language model of the whole."""

from __future__ import annotations

from opake.testing import MoESuite


class TestQwen35MoeText(MoESuite):
    model_type = "qwen3_5_moe_text"
    config = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}

    without = {"frozen_parameters_cost_nothing": "torch expands, without a copy, the frozen matrices of the recurrence"}

    # the recurrence computes in float32
    dtypes = ("fp32", "bf16")

    @classmethod
    def settle(cls, model):
        # a state that decays within a token or two loses its digits in the chunked sum
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.data.sub_(parameter.data.mean() + 1)
