"""Llama: LLaMA 2 and 3, DeepSeek-Coder, the dense Mellum; every checkpoint that says `model_type: "llama"`.

Nothing is left out.
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
    yield RMSNorm(hf.LlamaRMSNorm)
    yield AddRMSNorm(hf.LlamaDecoderLayer)
    yield GatedMLP(hf.LlamaMLP)
    yield CrossEntropy(hf.LlamaForCausalLM)
    yield LinearCrossEntropy(hf.LlamaForCausalLM)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.LlamaAttention)
    yield FuseMLP(hf.LlamaMLP)
