"""Gemma 2: norms before and after each sublayer, alternating windows, soft caps on scores and logits.

The record for the fused addition names the norm after attention, whose output is added, and the norm before the MLP.
Nothing of the vocabulary is left out. No kernel of PyTorch caps scores: attention takes opake's own in steps on CUDA.
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
    yield RMSNorm(hf.Gemma2RMSNorm)
    yield AddRMSNorm(hf.Gemma2DecoderLayer, addend="post_attention_layernorm", norm="pre_feedforward_layernorm")
    yield GatedMLP(hf.Gemma2MLP)
    yield CrossEntropy(hf.Gemma2ForCausalLM)
    yield LinearCrossEntropy(hf.Gemma2ForCausalLM)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.Gemma2Attention)
    yield FuseMLP(hf.Gemma2MLP)
