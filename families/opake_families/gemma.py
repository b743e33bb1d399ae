"""Gemma: norm weights are offsets from one, GELU in its tanh form, scaled embeddings. Nothing is left out."""

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
    yield RMSNorm(hf.GemmaRMSNorm)
    yield AddRMSNorm(hf.GemmaDecoderLayer)
    yield GatedMLP(hf.GemmaMLP)
    yield CrossEntropy(hf.GemmaForCausalLM)
    yield LinearCrossEntropy(hf.GemmaForCausalLM)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.GemmaAttention)
    yield FuseMLP(hf.GemmaMLP)
