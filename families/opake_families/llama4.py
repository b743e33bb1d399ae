"""Llama 4: attention in chunks with an unrotated layer in between; experts that take their input already weighted.

Left out: rotary embedding, which multiplies complex numbers; the norm of queries and keys, which has no weight; the
vision tower.
"""

from opake.records import (
    CrossEntropy,
    Experts,
    FuseMLP,
    FuseQKV,
    GatedMLP,
    LinearCrossEntropy,
    RMSNorm,
    hookimpl,
)


@hookimpl
def opake_kernel_patches(hf, config):
    head = hf.Llama4ForConditionalGeneration if config.model_type == "llama4" else hf.Llama4ForCausalLM
    yield RMSNorm(hf.Llama4TextRMSNorm)
    yield GatedMLP(hf.Llama4TextMLP)
    yield CrossEntropy(head)
    yield LinearCrossEntropy(head)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.Llama4TextAttention)
    yield FuseMLP(hf.Llama4TextMLP)


@hookimpl
def opake_moe_patch(hf):
    return Experts(hf.Llama4TextMoe)
