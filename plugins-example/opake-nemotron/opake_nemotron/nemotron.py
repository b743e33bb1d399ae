"""Nemotron: every checkpoint that says `model_type: "nemotron"`.

Layers normalise with LayerNorm around a weight that is kept as an offset from one, rotate half of a head, and have an
MLP without a gate: up, relu squared, down. Left out: the LoRA fusion of the MLP, which is one of gated MLPs.
"""

from opake.records import CrossEntropy, FuseQKV, LinearCrossEntropy, Rotary, hookimpl

from .records import LayerNorm, PlainMLP


@hookimpl
def opake_kernel_patches(hf):
    yield Rotary(hf)
    yield LayerNorm(hf.NemotronLayerNorm1P)
    yield PlainMLP(hf.NemotronMLP)
    yield CrossEntropy(hf.NemotronForCausalLM)
    yield LinearCrossEntropy(hf.NemotronForCausalLM)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.NemotronAttention)
