"""Peaks of checkpointing policies on CUDA, strictly ordered, in both engines; gradients the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from opake.bench.measure import peak_gib
from opake.checkpoint import selective_checkpointing
from opake.functional import per_example_grads
from opake.patches import apply_model_patches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# from most to least memory
POLICIES: dict[str, dict[str, Any] | None] = {
    "none": None,
    "every second layer": {"every": 2},
    "every layer": {},
    "every layer, kept on the CPU": {"save_on_cpu": True},
}


@pytest.mark.parametrize("engine", ["vmap", "batched"])
def test_peaks_are_strictly_ordered(engine: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=512, num_hidden_layers=16, num_attention_heads=8
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).bfloat16().train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    apply_model_patches(model)
    ids = torch.randint(3, 512, (8, 512), device="cuda")
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    step = per_example_grads(model, engine=engine)
    peaks, results = [], []
    for policy in POLICIES.values():
        selected = None if policy is None else selective_checkpointing(model, **policy)
        peaks.append(peak_gib(lambda: step(params, input_ids=ids, labels=ids)))
        results.append({name: g.cpu() for name, g in step(params, input_ids=ids, labels=ids).items()})
        if selected is not None:
            selected.undo()
    assert peaks == sorted(peaks, reverse=True), peaks
    assert len(set(peaks)) == len(peaks), peaks
    for found in results[1:]:
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, results[0][name], rtol=2e-2, atol=1e-4)
