"""Qwen3-Next: gated delta rule in most layers, gated attention in the rest; experts with a gated shared one.

The norms' weights are counted from one. Left out: the gated
norm of the recurrent layers, which is another operation, and the fused addition and norm, since what is added is the
attention of some layers and the recurrence of others.
"""

from opake.records import (
    CrossEntropy,
    Experts,
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
    yield RMSNorm(hf.Qwen3NextRMSNorm)
    yield GatedMLP(hf.Qwen3NextMLP)
    yield CrossEntropy(hf.Qwen3NextForCausalLM)
    yield LinearCrossEntropy(hf.Qwen3NextForCausalLM)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.Qwen3NextAttention)
    yield FuseMLP(hf.Qwen3NextMLP)


@hookimpl
def opake_moe_patch(hf):
    return Experts(hf.Qwen3NextExperts)
