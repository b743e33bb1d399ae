"""Gemma 3, text (`gemma3_text`) and text with images (`gemma3`), whose text layers are the same.

The record for the fused addition names the norm after attention, whose output is added, and the norm before the MLP.
Left out: the vision tower, whose LayerNorms and ungated MLPs take nothing of the vocabulary.
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
def opake_kernel_patches(hf, config):
    yield Rotary(hf)
    yield RMSNorm(hf.Gemma3RMSNorm)
    yield AddRMSNorm(hf.Gemma3DecoderLayer, addend="post_attention_layernorm", norm="pre_feedforward_layernorm")
    yield GatedMLP(hf.Gemma3MLP)
    if config.model_type == "gemma3_text":
        yield CrossEntropy(hf.Gemma3ForCausalLM)
        yield LinearCrossEntropy(hf.Gemma3ForCausalLM)
    else:
        yield CrossEntropy(hf.Gemma3ForConditionalGeneration)
        yield LinearCrossEntropy(hf.Gemma3ForConditionalGeneration)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.Gemma3Attention)
    yield FuseMLP(hf.Gemma3MLP)
