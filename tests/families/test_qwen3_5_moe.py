"""Qwen3.5-MoE, as a text model and as the language model of the whole."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForConditionalGeneration

from opake.checking.tiny import tiny_batch, tiny_config
from opake.patches import apply_model_patches
from opake.testing import MoESuite
from opake.testing.oracle import model_loop_gradients, relative_error
from opake.testing.vmapped import vmap_gradients


class TestQwen35MoeText(MoESuite):
    model_type = "qwen3_5_moe_text"
    config = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}

    without = {"frozen_parameters_cost_nothing": "torch expands, without a copy, the frozen matrices of the recurrence"}

    # the recurrence computes in float32
    dtypes = ("fp32", "bf16")

    @classmethod
    def settle(cls, model):
        # a state that decays within a token or two loses its digits in the chunked sum
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.data.sub_(parameter.data.mean() + 1)


@pytest.fixture(scope="module")
def whole():
    """The model with its vision tower, frozen; the language model in the same random state as in the suite."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3_5MoeForConditionalGeneration(tiny_config("qwen3_5_moe")).train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("visual" not in name)
            parameter.data.copy_(torch.randn(parameter.shape)).mul_(0.15)
    TestQwen35MoeText.settle(model)
    return model


@pytest.mark.parametrize("padding", ["right", "left"])
def test_whole_model(whole, padding):
    model, rows = copy.deepcopy(whole), tiny_batch(padding=padding)
    report = apply_model_patches(model, activation=True, rms_norm=True, cross_entropy=True)
    assert report.family == "qwen3_5_moe"
    assert {row.state for row in report.rows if row.record.startswith("Experts(")} == {"applied"}
    assert [row.state for row in report.find(flag="cross_entropy")] == ["applied"]
    assert relative_error(vmap_gradients(model, rows), model_loop_gradients(whole, **rows)) <= 5e-6
