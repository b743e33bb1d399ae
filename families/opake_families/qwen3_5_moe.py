"""Qwen3.5-MoE: as Qwen3-Next; served under the name of the whole model and under that of its text model.

Left out: the gated norm of the recurrent layers, which is another operation; the fused addition and norm, since what
is added is the attention of some layers and the recurrence of others; the vision tower.
"""

from opake.records import (
    CrossEntropy,
    Experts,
    FuseMLP,
    FuseQKV,
    GatedMLP,
    LinearCrossEntropy,
    RMSNorm,
    Rotary,
    hookimpl,
)


@hookimpl
def opake_kernel_patches(hf, config):
    whole = config.model_type == "qwen3_5_moe"
    head = hf.Qwen3_5MoeForConditionalGeneration if whole else hf.Qwen3_5MoeForCausalLM
    yield Rotary(hf)
    yield RMSNorm(hf.Qwen3_5MoeRMSNorm)
    yield GatedMLP(hf.Qwen3_5MoeMLP)
    yield CrossEntropy(head)
    yield LinearCrossEntropy(head)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.Qwen3_5MoeAttention)
    yield FuseMLP(hf.Qwen3_5MoeMLP)


@hookimpl
def opake_moe_patch(hf):
    return Experts(hf.Qwen3_5MoeExperts)
