"""GPT-OSS: attention with sinks, experts with biases and a clamped gate whose halves alternate.

The router weighs the chosen experts alone. Left out: weights kept in MXFP4, which stay with Transformers.
"""

from opake.records import AddRMSNorm, CrossEntropy, Experts, FuseQKV, LinearCrossEntropy, RMSNorm, Rotary, hookimpl


@hookimpl
def opake_kernel_patches(hf):
    yield Rotary(hf)
    yield RMSNorm(hf.GptOssRMSNorm)
    yield AddRMSNorm(hf.GptOssDecoderLayer)
    yield CrossEntropy(hf.GptOssForCausalLM)
    yield LinearCrossEntropy(hf.GptOssForCausalLM)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.GptOssAttention)


@hookimpl
def opake_moe_patch(hf):
    return Experts(hf.GptOssExperts)
