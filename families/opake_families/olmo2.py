"""OLMo 2: each norm follows its sublayer, and queries and keys are normalised over the whole projection.

Left out: the fused addition and norm. What is normalised is the output of a sublayer, not a sum.
"""

from opake.records import CrossEntropy, FuseMLP, FuseQKV, GatedMLP, LinearCrossEntropy, RMSNorm, Rotary, hookimpl


@hookimpl
def opake_kernel_patches(hf):
    yield Rotary(hf)
    yield RMSNorm(hf.Olmo2RMSNorm)
    yield GatedMLP(hf.Olmo2MLP)
    yield CrossEntropy(hf.Olmo2ForCausalLM)
    yield LinearCrossEntropy(hf.Olmo2ForCausalLM)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.Olmo2Attention)
    yield FuseMLP(hf.Olmo2MLP)
