"""Mixtral: every layer is sparse, and the weights of the chosen experts always add up to one. Nothing is left out."""

from opake.records import (
    AddRMSNorm,
    CrossEntropy,
    Experts,
    FuseQKV,
    LinearCrossEntropy,
    RMSNorm,
    Rotary,
    hookimpl,
)


@hookimpl
def opake_kernel_patches(hf):
    yield Rotary(hf)
    yield RMSNorm(hf.MixtralRMSNorm)
    yield AddRMSNorm(hf.MixtralDecoderLayer)
    yield CrossEntropy(hf.MixtralForCausalLM)
    yield LinearCrossEntropy(hf.MixtralForCausalLM)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.MixtralAttention)


@hookimpl
def opake_moe_patch(hf):
    return Experts(hf.MixtralExperts)
