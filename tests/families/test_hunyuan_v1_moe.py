"""HunYuan-V1-MoE: experts beside a shared MLP."""

from __future__ import annotations

from opake.testing import MoESuite


class TestHunYuanMoE(MoESuite):
    model_type = "hunyuan_v1_moe"
