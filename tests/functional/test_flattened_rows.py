"""A layer that lays rows and tokens out as one dimension: the batched engine leaves the step to vmap and says why."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2MoeConfig

from opake.errors import EngineUnavailable
from opake.functional import clipped_grad, per_example_grads
from opake.patches import apply_model_patches
from opake.testing.oracle import loop_gradients, relative_error

V, B, T = 29, 3, 5
IDS = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(0))


def model():
    config = Qwen2MoeConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
        use_cache=False,
    )
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config)
    lora = LoraConfig(r=2, target_modules=r".*shared_expert\.(gate|up|down)_proj", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora).eval()
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.normal_(std=0.1)
    return model


def trainable(model):
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def test_gradients_are_right_and_the_reason_is_told():
    stock, patched = model(), model()
    apply_model_patches(patched)
    params = trainable(stock)

    def loss(params, ids):
        batch = {"input_ids": ids[None], "labels": ids[None]}
        return torch.func.functional_call(stock, params, (), batch).loss

    want = loop_gradients(loss, params, IDS)
    rows = {"input_ids": IDS, "labels": IDS}
    assert relative_error(per_example_grads(patched)(params, **rows), want) < 5e-6
    out = clipped_grad(patched, clip_norm=1.0)(params, **rows)
    assert out.engine == "vmap"
    assert "one dimension" in out.reason
    with pytest.raises(EngineUnavailable, match=r"one dimension.*opake_lora_mlp"):
        clipped_grad(patched, clip_norm=1.0, engine="batched")(params, **rows)
