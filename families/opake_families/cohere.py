"""Command R: attention and MLP side by side on one LayerNorm without bias, interleaved rotation, scaled logits.

Left out: RMSNorm, because the norm subtracts the mean, and with it the fused addition and norm.
"""

from opake.records import CrossEntropy, FuseMLP, FuseQKV, GatedMLP, LinearCrossEntropy, Rotary, hookimpl


@hookimpl
def opake_kernel_patches(hf):
    yield Rotary(hf)
    yield GatedMLP(hf.CohereMLP)
    yield CrossEntropy(hf.CohereForCausalLM)
    yield LinearCrossEntropy(hf.CohereForCausalLM)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.CohereAttention)
    yield FuseMLP(hf.CohereMLP)
