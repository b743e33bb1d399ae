"""GLM-4: a norm before and one after each sublayer, interleaved rotation of half a head, gate and up in one projection.

The record for the fused addition names the norm after attention, whose output is added, and the norm of that sum.
Nothing is left out.
"""

from opake.records import (
    AddRMSNorm,
    CrossEntropy,
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
    yield RMSNorm(hf.Glm4RMSNorm)
    yield AddRMSNorm(hf.Glm4DecoderLayer, addend="post_self_attn_layernorm", norm="post_attention_layernorm")
    yield GatedMLP(hf.Glm4MLP)
    yield CrossEntropy(hf.Glm4ForCausalLM)
    yield LinearCrossEntropy(hf.Glm4ForCausalLM)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.Glm4Attention)
    yield FuseMLP(hf.Glm4MLP)
