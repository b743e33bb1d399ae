"""Mellum 2: sparse and dense layers, full and sliding, each kind with a rotary table of its own.

Queries and keys are normalised per head by the class of the layers' norms. Nothing is left out.
"""

from opake.records import (
    AddRMSNorm,
    CrossEntropy,
    Experts,
    FuseMLP,
    FuseQKV,
    GatedMLP,
    LinearCrossEntropy,
    RMSNorm,
    Rotary,
    hookimpl,
)

SINCE = {"mellum": "5.10"}


@hookimpl
def opake_kernel_patches(hf):
    yield Rotary(hf)
    yield RMSNorm(hf.MellumRMSNorm)
    yield AddRMSNorm(hf.MellumDecoderLayer)
    yield GatedMLP(hf.MellumMLP)
    yield CrossEntropy(hf.MellumForCausalLM)
    yield LinearCrossEntropy(hf.MellumForCausalLM)


@hookimpl
def opake_lora_fusions(hf):
    yield FuseQKV(hf.MellumAttention)
    yield FuseMLP(hf.MellumMLP)


@hookimpl
def opake_moe_patch(hf):
    return Experts(hf.MellumExperts)
