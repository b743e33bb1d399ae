"""Model types without a plugin: the generic patches serve them, and one warning says so."""

from __future__ import annotations

from opake.testing import GenericSuite


class TestStarcoder2(GenericSuite):
    model_type = "starcoder2"
    config = {"sliding_window": 6}


class TestStableLm(GenericSuite):
    """LayerNorm, partial rotation, and a choice of parallel blocks."""

    model_type = "stablelm"
    config = {"use_parallel_residual": True, "qk_layernorm": True}
