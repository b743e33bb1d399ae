"""Phi-3.5-MoE: its router samples in training, so rows are compared in eval mode; in training they are only run."""

from __future__ import annotations

import pytest
import torch

from opake.checking.tiny import tiny_batch, tiny_model
from opake.patches import apply_model_patches, restore
from opake.testing.cases.plugin import PluginCases
from opake.testing.oracle import model_loop_gradients, relative_error
from opake.testing.vmapped import vmap_gradients


class TestPlugin(PluginCases):
    model_type = "phimoe"
    config = {}
    attentions = ("sdpa", "eager")


KERNELS = ("rope", "cross_entropy", "fused_linear_cross_entropy")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("padding", ["right", "left", "none"])
@pytest.mark.parametrize("kernels", [(), KERNELS])
def test_per_example_gradients(attention, padding, kernels):
    stock, model = (tiny_model("phimoe", attention=attention).eval() for _ in "ab")
    report = apply_model_patches(model, **dict.fromkeys(kernels, True))
    assert {row.state for row in report.rows if row.record.startswith("Experts(")} == {"applied"}
    assert {row.state for flag in kernels for row in report.find(flag=flag)} <= {"applied"}
    rows = tiny_batch(padding=padding)
    assert relative_error(vmap_gradients(model, rows), model_loop_gradients(stock, **rows)) <= 5e-6


def test_training():
    """The sampling router under vmap: different numbers for different rows, and the same again for the same seed."""
    model = tiny_model("phimoe").train()
    apply_model_patches(model)
    rows = tiny_batch(rows=1, padding="none")
    twice = {name: value.repeat(2, 1) for name, value in rows.items()}
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        found.append(vmap_gradients(model, twice, randomness="different"))
    name = "model.layers.0.mlp.experts.down_proj"
    assert torch.equal(found[0][name], found[1][name])
    assert not torch.allclose(found[0][name][0], found[0][name][1])
    assert all(tensor.isfinite().all() for tensor in found[0].values())


def test_restore():
    model = tiny_model("phimoe").eval()
    before = model(**tiny_batch()).logits
    apply_model_patches(model)
    restore(model)
    assert torch.equal(model(**tiny_batch()).logits, before)
