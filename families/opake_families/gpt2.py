"""GPT-2: learned positions, LayerNorm, combined projections as `Conv1D`, an MLP without a gate.

Left out: rotary embedding, RMSNorm, gated MLP and the LoRA fusions, for which there is no site; the loss remains.
"""

from opake.records import CrossEntropy, LinearCrossEntropy, hookimpl


@hookimpl
def opake_kernel_patches(hf):
    yield CrossEntropy(hf.GPT2LMHeadModel)
    yield LinearCrossEntropy(hf.GPT2LMHeadModel)
