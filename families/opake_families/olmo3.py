"""OLMo 3: as OLMo 2, with sliding layers and a rotary table for each layer type.

Left out: the fused addition and norm. What is normalised is the output of a sublayer, not a sum.
"""

from opake.records import CrossEntropy, FuseMLP, FuseQKV, GatedMLP, LinearCrossEntropy, RMSNorm, Rotary, hookimpl


@hookimpl
def opake_kernel_patches(hf):
    yield Rotary(hf)
    yield RMSNorm(hf.Olmo3RMSNorm)
    yield GatedMLP(hf.Olmo3MLP)
    yield CrossEntropy(hf.Olmo3ForCausalLM)
    yield LinearCrossEntropy(hf.Olmo3ForCausalLM)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.Olmo3Attention)
    yield FuseMLP(hf.Olmo3MLP)
