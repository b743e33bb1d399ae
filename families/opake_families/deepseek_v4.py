"""DeepSeek-V4: residual streams, compressed attention, experts with a clamped gate, some routed by token id.

Left out: rotary embedding, which turns the trailing part of a head and turns the output back; the fused addition and
norm, for want of a residual to add; the clamped shared experts; fused projections of queries, keys and values.
"""

from opake.records import CrossEntropy, Experts, LinearCrossEntropy, RMSNorm, hookimpl


@hookimpl
def opake_kernel_patches(hf):
    yield RMSNorm(hf.DeepseekV4RMSNorm)
    yield CrossEntropy(hf.DeepseekV4ForCausalLM)
    yield LinearCrossEntropy(hf.DeepseekV4ForCausalLM)


@hookimpl
def opake_moe_patch(hf):
    return Experts(hf.DeepseekV4Experts)
