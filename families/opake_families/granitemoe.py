"""Granite MoE: scaled residuals, embeddings and logits; the router weighs the chosen experts alone.

Nothing is left out. The code that multiplies stays in place; the fused addition takes a branch after its multiplier.
"""

from opake.records import AddRMSNorm, CrossEntropy, Experts, FuseQKV, LinearCrossEntropy, RMSNorm, Rotary, hookimpl


@hookimpl
def opake_kernel_patches(hf):
    yield Rotary(hf)
    yield RMSNorm(hf.GraniteMoeRMSNorm)
    yield AddRMSNorm(hf.GraniteMoeDecoderLayer)
    yield CrossEntropy(hf.GraniteMoeForCausalLM)
    yield LinearCrossEntropy(hf.GraniteMoeForCausalLM)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.GraniteMoeAttention)


@hookimpl
def opake_moe_patch(hf):
    return Experts(hf.GraniteMoeExperts)
