"""Llama 4: chunked and full attention, sparse and dense layers."""

from __future__ import annotations

import pytest

from opake.checking.tiny import tiny_batch, tiny_model
from opake.patches import apply_model_patches, patch_report
from opake.testing import FamilySuite
from opake.testing.oracle import model_loop_gradients, relative_error
from opake.testing.vmapped import vmap_gradients


class TestLlama4(FamilySuite):
    model_type = "llama4_text"
    config = {"moe_layers": [0], "intermediate_size_mlp": 48}


@pytest.mark.parametrize("flags", [{}, {"grouped_moe": False}, {"moe": False}])
@pytest.mark.parametrize("choices", [1, 2])
def test_experts(choices, flags):
    stock, model = (tiny_model("llama4_text", num_experts_per_tok=choices, moe_layers=[0]) for _ in "ab")
    report = apply_model_patches(model, **flags)
    state = "off" if "moe" in flags else "applied"
    assert {row.state for row in report.rows if row.record.startswith("Experts(")} == {state}
    rows = tiny_batch(padding="left")
    if "moe" not in flags:
        assert relative_error(vmap_gradients(model, rows), model_loop_gradients(stock, **rows)) <= 5e-6
        assert not patch_report(model).fallbacks
