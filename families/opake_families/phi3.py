"""Phi-3, Phi-3.5 and Phi-4: queries, keys and values in one projection, gate and up in another.

Left out: the LoRA fusion of queries, keys and values. They are one linear layer, with one adapter, already.
"""

from opake.records import AddRMSNorm, CrossEntropy, FuseMLP, GatedMLP, LinearCrossEntropy, RMSNorm, Rotary, hookimpl


@hookimpl
def opake_kernel_patches(hf):
    yield Rotary(hf)
    yield RMSNorm(hf.Phi3RMSNorm)
    yield AddRMSNorm(hf.Phi3DecoderLayer)
    yield GatedMLP(hf.Phi3MLP)
    yield CrossEntropy(hf.Phi3ForCausalLM)
    yield LinearCrossEntropy(hf.Phi3ForCausalLM)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseMLP(hf.Phi3MLP)
