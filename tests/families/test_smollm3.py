"""SmolLM3: one layer rotates, the other has no positions."""

from __future__ import annotations

from opake.testing import FamilySuite


class TestSmolLM3(FamilySuite):
    model_type = "smollm3"
    config = {"no_rope_layers": [1, 0], "mlp_bias": True}
