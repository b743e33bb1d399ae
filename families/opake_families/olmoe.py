"""OLMoE: queries and keys are normalised over the whole projection; every layer is sparse. Nothing is left out."""

from opake.records import AddRMSNorm, CrossEntropy, Experts, FuseQKV, LinearCrossEntropy, RMSNorm, Rotary, hookimpl


@hookimpl
def opake_kernel_patches(hf):
    yield Rotary(hf)
    yield RMSNorm(hf.OlmoeRMSNorm)
    yield AddRMSNorm(hf.OlmoeDecoderLayer)
    yield CrossEntropy(hf.OlmoeForCausalLM)
    yield LinearCrossEntropy(hf.OlmoeForCausalLM)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.OlmoeAttention)


@hookimpl
def opake_moe_patch(hf):
    return Experts(hf.OlmoeExperts)
