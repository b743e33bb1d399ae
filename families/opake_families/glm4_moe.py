"""GLM-4 MoE: dense layers first, then experts beside a shared one; scores choose in groups. Nothing is left out."""

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
    yield RMSNorm(hf.Glm4MoeRMSNorm)
    yield AddRMSNorm(hf.Glm4MoeDecoderLayer)
    yield GatedMLP(hf.Glm4MoeMLP)
    yield CrossEntropy(hf.Glm4MoeForCausalLM)
    yield LinearCrossEntropy(hf.Glm4MoeForCausalLM)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.Glm4MoeAttention)
    yield FuseMLP(hf.Glm4MoeMLP)


@hookimpl
def opake_moe_patch(hf):
    # older Transformers calls them otherwise
    return Experts(hf.Glm4MoeExperts if isinstance(hf.Glm4MoeExperts, type) else hf.Glm4MoeNaiveMoe)
