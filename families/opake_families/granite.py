"""Granite: multipliers on every residual branch, on the embeddings, the scores and the logits. Nothing is left out.

The code that multiplies stays in place; the fused addition takes a branch after its multiplier.
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
    yield RMSNorm(hf.GraniteRMSNorm)
    yield AddRMSNorm(hf.GraniteDecoderLayer)
    yield GatedMLP(hf.GraniteMLP)
    yield CrossEntropy(hf.GraniteForCausalLM)
    yield LinearCrossEntropy(hf.GraniteForCausalLM)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.GraniteAttention)
    yield FuseMLP(hf.GraniteMLP)
