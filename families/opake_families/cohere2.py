"""Command R7B: as Command R, with sliding layers, which alone rotate.

Left out: RMSNorm, because the norm subtracts the mean, and with it the fused addition and norm.
"""

from opake.records import CrossEntropy, FuseMLP, FuseQKV, GatedMLP, LinearCrossEntropy, Rotary, hookimpl


@hookimpl
def opake_kernel_patches(hf):
    yield Rotary(hf)
    yield GatedMLP(hf.Cohere2MLP)
    yield CrossEntropy(hf.Cohere2ForCausalLM)
    yield LinearCrossEntropy(hf.Cohere2ForCausalLM)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.Cohere2Attention)
    yield FuseMLP(hf.Cohere2MLP)
