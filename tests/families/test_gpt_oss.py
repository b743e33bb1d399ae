"""GPT-OSS: sinks, and experts with biases and a clamped gate."""

from __future__ import annotations

from opake.testing import MoESuite


class TestGptOss(MoESuite):
    model_type = "gpt_oss"
    attentions = ("eager",)
