"""Ministral: `layer_types` says which layers slide. Nothing is left out."""

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
    yield RMSNorm(hf.MinistralRMSNorm)
    yield AddRMSNorm(hf.MinistralDecoderLayer)
    yield GatedMLP(hf.MinistralMLP)
    yield CrossEntropy(hf.MinistralForCausalLM)
    yield LinearCrossEntropy(hf.MinistralForCausalLM)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.MinistralAttention)
    yield FuseMLP(hf.MinistralMLP)
