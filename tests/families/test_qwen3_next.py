"""Qwen3-Next: a recurrent and an attention layer; one of them dense."""

from __future__ import annotations

from opake.testing import MoESuite


class TestQwen3Next(MoESuite):
    model_type = "qwen3_next"
    config = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [1]}

    # the recurrence computes in float32
    dtypes = ("fp32", "bf16")

    @classmethod
    def settle(cls, model):
        # a state that decays within a token or two loses its digits in the chunked sum
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.data.sub_(parameter.data.mean() + 1)
