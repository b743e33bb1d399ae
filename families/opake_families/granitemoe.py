"""Granite MoE: scaled residuals, embeddings and logits; the router weighs the chosen experts alone.

Left out: the fused addition and norm, because the residual branch is scaled before it is added.
"""

from opake.records import CrossEntropy, Experts, FuseQKV, LinearCrossEntropy, RMSNorm, Rotary, hookimpl


@hookimpl
def opake_kernel_patches(hf):
    yield Rotary(hf)
    yield RMSNorm(hf.GraniteMoeRMSNorm)
    yield CrossEntropy(hf.GraniteMoeForCausalLM)
    yield LinearCrossEntropy(hf.GraniteMoeForCausalLM)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.GraniteMoeAttention)


@hookimpl
def opake_moe_patch(hf):
    return Experts(hf.GraniteMoeExperts)
