"""DeepSeek-V3: latent attention, a dense layer first."""

from __future__ import annotations

from opake.testing import MoESuite


class TestDeepseekV3(MoESuite):
    model_type = "deepseek_v3"
    # the router computes in float32
    dtypes = ("fp32", "bf16")
