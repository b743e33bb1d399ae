"""Qwen3-MoE: Qwen3 with experts in all layers, or in those that the config does not name as dense.

Nothing is left out.
"""

from opake.records import (
    AddRMSNorm,
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
def opake_kernel_patches(hf):
    yield Rotary(hf)
    yield RMSNorm(hf.Qwen3MoeRMSNorm)
    yield AddRMSNorm(hf.Qwen3MoeDecoderLayer)
    yield GatedMLP(hf.Qwen3MoeMLP)
    yield CrossEntropy(hf.Qwen3MoeForCausalLM)
    yield LinearCrossEntropy(hf.Qwen3MoeForCausalLM)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.Qwen3MoeAttention)
    yield FuseMLP(hf.Qwen3MoeMLP)


@hookimpl
def opake_moe_patch(hf):
    return Experts(hf.Qwen3MoeExperts)
