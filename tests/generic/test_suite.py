"""The whole conformance suite for two model types that no plugin claims."""

from __future__ import annotations

from opake.testing import GenericSuite


class TestStarcoder2(GenericSuite):
    """LayerNorm, biases, a plain MLP, sliding windows."""

    model_type = "starcoder2"


class TestGptNeoX(GenericSuite):
    """Parallel residual, combined projections, partial rotation."""

    model_type = "gpt_neox"
