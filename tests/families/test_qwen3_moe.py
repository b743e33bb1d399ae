"""Qwen3-MoE, a dense layer among sparse ones."""

from __future__ import annotations

from opake.testing import MoESuite


class TestQwen3Moe(MoESuite):
    model_type = "qwen3_moe"
    config = {"num_hidden_layers": 3, "mlp_only_layers": [1]}
