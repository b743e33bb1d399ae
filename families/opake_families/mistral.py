"""Mistral: every layer uses a sliding window when the config sets one. Nothing is left out."""

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
    yield RMSNorm(hf.MistralRMSNorm)
    yield AddRMSNorm(hf.MistralDecoderLayer)
    yield GatedMLP(hf.MistralMLP)
    yield CrossEntropy(hf.MistralForCausalLM)
    yield LinearCrossEntropy(hf.MistralForCausalLM)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.MistralAttention)
    yield FuseMLP(hf.MistralMLP)
