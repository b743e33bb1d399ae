"""Gemma 2: its reference is the stock model with eager attention, the only one in which stock honours the soft cap."""

from __future__ import annotations

import pytest

from opake.checking.tiny import tiny_config, tiny_model
from opake.patches import apply_model_patches
from opake.testing import FamilySuite
from opake.testing.cases.base import LIMITS, assert_same_gradients
from opake.testing.vmapped import vmap_gradients
from opake.testing.workbench import Bench


class TestGemma2(FamilySuite):
    model_type = "gemma2"
    attentions = ("eager",)

    @pytest.mark.parametrize("padding", ["right", "none"])
    def test_loaded_with_sdpa_the_soft_cap_counts(self, bench: Bench, padding: str) -> None:
        """Transformers before 5.21 takes sdpa and drops the cap; the patched model follows stock eager instead."""
        try:
            model = tiny_model(tiny_config("gemma2"), attention="sdpa")
        except ValueError as error:
            pytest.skip(f"this Transformers refuses: {str(error).partition(' yet')[0]}")
        apply_model_patches(model)
        want = bench.reference("eager", "fp32", padding)
        assert_same_gradients(vmap_gradients(model, bench.batch(padding)), want, LIMITS["fp32"])
