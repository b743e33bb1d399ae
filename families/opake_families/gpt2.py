"""GPT-2: learned positions, LayerNorm, combined projections as `Conv1D`, an ungated MLP.

So there is no rotary embedding, no RMSNorm and no gated activation to fuse; the loss is the only kernel site.
"""

from opake.records import CrossEntropy, LinearCrossEntropy, hookimpl


@hookimpl
def opake_kernel_patches(hf):
    yield CrossEntropy(hf.GPT2LMHeadModel)
    yield LinearCrossEntropy(hf.GPT2LMHeadModel)
