"""Qwen2-MoE: experts beside a gated shared one; dense layers where the config names them. Nothing is left out."""

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
    yield RMSNorm(hf.Qwen2MoeRMSNorm)
    yield AddRMSNorm(hf.Qwen2MoeDecoderLayer)
    yield GatedMLP(hf.Qwen2MoeMLP)
    yield CrossEntropy(hf.Qwen2MoeForCausalLM)
    yield LinearCrossEntropy(hf.Qwen2MoeForCausalLM)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.Qwen2MoeAttention)
    yield FuseMLP(hf.Qwen2MoeMLP)


@hookimpl
def opake_moe_patch(hf):
    return Experts(hf.Qwen2MoeExperts)
