"""Qwen3: queries and keys are normalised per head before they are rotated. Nothing is left out.

The class of those norms is that of the layers, so one record covers both.
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
    yield RMSNorm(hf.Qwen3RMSNorm)
    yield AddRMSNorm(hf.Qwen3DecoderLayer)
    yield GatedMLP(hf.Qwen3MLP)
    yield CrossEntropy(hf.Qwen3ForCausalLM)
    yield LinearCrossEntropy(hf.Qwen3ForCausalLM)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.Qwen3Attention)
    yield FuseMLP(hf.Qwen3MLP)
