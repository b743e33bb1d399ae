"""HunYuan-V1-MoE: experts beside a shared MLP; queries and keys are normalised after they are rotated.

Nothing is left out.
"""

from opake.records import (
    AddRMSNorm,
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
    yield RMSNorm(hf.HunYuanMoEV1RMSNorm)
    yield AddRMSNorm(hf.HunYuanMoEV1DecoderLayer)
    yield GatedMLP(hf.HunYuanMoEV1MLP)
    yield CrossEntropy(hf.HunYuanMoEV1ForCausalLM)
    yield LinearCrossEntropy(hf.HunYuanMoEV1ForCausalLM)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.HunYuanMoEV1Attention)
    yield FuseMLP(hf.HunYuanMoEV1MLP)


@hookimpl
def opake_moe_patch(hf):
    return Experts(hf.HunYuanMoEV1Experts)
