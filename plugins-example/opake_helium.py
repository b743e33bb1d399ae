"""Helium: the small language models of Kyutai, every checkpoint that says `model_type: "helium"`."""

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
    yield RMSNorm(hf.HeliumRMSNorm)
    yield AddRMSNorm(hf.HeliumDecoderLayer)
    yield GatedMLP(hf.HeliumMLP)
    yield CrossEntropy(hf.HeliumForCausalLM)
    yield LinearCrossEntropy(hf.HeliumForCausalLM)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.HeliumAttention)
    yield FuseMLP(hf.HeliumMLP)
