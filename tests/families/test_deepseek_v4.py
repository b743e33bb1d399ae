"""DeepSeek-V4: compressed attention, routing by token id, experts with a clamped gate."""

from __future__ import annotations

from opake.testing import MoESuite


class TestDeepseekV4(MoESuite):
    model_type = "deepseek_v4"
    attentions = ("eager",)
    # rotary embedding and residual streams are mixed in float32
    dtypes = ("fp32", "bf16")
    without = {
        "inputs_embeds": "the router of the first layers reads token ids",
        "padded_row_equals_the_row_alone": "tokens are compressed in windows counted from the first, padding included",
    }
