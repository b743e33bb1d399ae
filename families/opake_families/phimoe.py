"""Phi-3.5-MoE: experts chosen by a sampling router in training; LayerNorm.

Left out: RMSNorm and what builds on it, because the norms subtract the mean.
"""

from opake.records import CrossEntropy, Experts, FuseQKV, LinearCrossEntropy, Rotary, hookimpl


@hookimpl
def opake_kernel_patches(hf):
    yield Rotary(hf)
    yield CrossEntropy(hf.PhimoeForCausalLM)
    yield LinearCrossEntropy(hf.PhimoeForCausalLM)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.PhimoeAttention)


@hookimpl
def opake_moe_patch(hf):
    return Experts(hf.PhimoeExperts)
