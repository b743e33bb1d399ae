"""SmolLM3: some layers, by `config.no_rope_layers`, have no position embedding. Nothing is left out.

A layer without it never calls the rotary embedding, so that declaring it is right for both kinds.
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
    yield RMSNorm(hf.SmolLM3RMSNorm)
    yield AddRMSNorm(hf.SmolLM3DecoderLayer)
    yield GatedMLP(hf.SmolLM3MLP)
    yield CrossEntropy(hf.SmolLM3ForCausalLM)
    yield LinearCrossEntropy(hf.SmolLM3ForCausalLM)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.SmolLM3Attention)
    yield FuseMLP(hf.SmolLM3MLP)
