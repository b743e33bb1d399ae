"""Qwen2 and Qwen2.5: biases on the query, key and value projections, none on the output. Nothing is left out."""

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
    yield RMSNorm(hf.Qwen2RMSNorm)
    yield AddRMSNorm(hf.Qwen2DecoderLayer)
    yield GatedMLP(hf.Qwen2MLP)
    yield CrossEntropy(hf.Qwen2ForCausalLM)
    yield LinearCrossEntropy(hf.Qwen2ForCausalLM)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.Qwen2Attention)
    yield FuseMLP(hf.Qwen2MLP)
