"""The whole conformance suite for model types that no plugin claims."""

from __future__ import annotations

from opake.testing import GenericSuite


class TestStarcoder2(GenericSuite):
    """LayerNorm, biases, a plain MLP, sliding windows."""

    model_type = "starcoder2"


class TestGptNeoX(GenericSuite):
    """Parallel residual, combined projections, partial rotation."""

    model_type = "gpt_neox"


class TestBloom(GenericSuite):
    """Attention written out by hand, with ALiBi; an activation that is an autograd function of the old form."""

    model_type = "bloom"
    attentions = ("eager",)
