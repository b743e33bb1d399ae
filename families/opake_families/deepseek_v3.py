"""DeepSeek-V3 and R1: latent attention, dense layers first, then experts beside shared ones, chosen in groups.

Left out: fused projections of queries, keys and values, which latent attention does not have side by side.
"""

from opake.records import (
    AddRMSNorm,
    CrossEntropy,
    Experts,
    FuseMLP,
    GatedMLP,
    LinearCrossEntropy,
    RMSNorm,
    Rotary,
    hookimpl,
)


@hookimpl
def opake_kernel_patches(hf):
    yield Rotary(hf)
    yield RMSNorm(hf.DeepseekV3RMSNorm)
    yield AddRMSNorm(hf.DeepseekV3DecoderLayer)
    yield GatedMLP(hf.DeepseekV3MLP)
    yield CrossEntropy(hf.DeepseekV3ForCausalLM)
    yield LinearCrossEntropy(hf.DeepseekV3ForCausalLM)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseMLP(hf.DeepseekV3MLP)


@hookimpl
def opake_moe_patch(hf):
    # older Transformers calls them otherwise
    return Experts(hf.DeepseekV3Experts if isinstance(hf.DeepseekV3Experts, type) else hf.DeepseekV3NaiveMoe)
