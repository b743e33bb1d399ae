"""EXAONE 4: each norm follows its sublayer; in hybrid models only sliding layers rotate.

Left out: the fused addition and norm. What is normalised is the output of a sublayer, not a sum.
"""

from opake.records import CrossEntropy, FuseMLP, FuseQKV, GatedMLP, LinearCrossEntropy, RMSNorm, Rotary, hookimpl


@hookimpl
def opake_kernel_patches(hf):
    yield Rotary(hf)
    yield RMSNorm(hf.Exaone4RMSNorm)
    yield GatedMLP(hf.Exaone4MLP)
    yield CrossEntropy(hf.Exaone4ForCausalLM)
    yield LinearCrossEntropy(hf.Exaone4ForCausalLM)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.Exaone4Attention)
    yield FuseMLP(hf.Exaone4MLP)
