"""Fused Triton ops with a plain PyTorch twin each; they know nothing about models."""

from .add_rms_norm import opake_fused_add_rms_norm
from .attention import opake_attention
from .cross_entropy import opake_cross_entropy_loss
from .gated import (
    opake_gated_activation,
    opake_geglu_approx,
    opake_geglu_exact,
    opake_relu_squared,
    opake_swiglu,
)
from .linear_cross_entropy import opake_linear_cross_entropy_loss
from .lora import opake_lora_mlp, opake_lora_qkv, opake_lora_w
from .moe import opake_moe
from .rms_norm import opake_rms_norm
from .rope import opake_rope, opake_rope_qk
from .selective_log_softmax import opake_selective_log_softmax

__all__ = [
    "opake_attention",
    "opake_cross_entropy_loss",
    "opake_fused_add_rms_norm",
    "opake_gated_activation",
    "opake_geglu_approx",
    "opake_geglu_exact",
    "opake_linear_cross_entropy_loss",
    "opake_lora_mlp",
    "opake_lora_qkv",
    "opake_lora_w",
    "opake_moe",
    "opake_relu_squared",
    "opake_rms_norm",
    "opake_rope",
    "opake_rope_qk",
    "opake_selective_log_softmax",
    "opake_swiglu",
]
