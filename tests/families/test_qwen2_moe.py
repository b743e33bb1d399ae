"""Qwen2-MoE, a dense layer among sparse ones."""

from __future__ import annotations

from opake.testing import MoESuite


class TestQwen2Moe(MoESuite):
    model_type = "qwen2_moe"
    config = {"mlp_only_layers": [1]}
