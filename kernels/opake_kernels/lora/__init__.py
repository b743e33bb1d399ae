"""LoRA as fused ops: one projection, the three of an attention, a whole gated MLP; per-example gradients of A and B."""

from .lora_mlp import lora_mlp_reference, opake_lora_mlp
from .lora_qkv import lora_qkv_reference, opake_lora_qkv
from .lora_w import lora_w_reference, opake_lora_w

__all__ = [
    "lora_mlp_reference",
    "lora_qkv_reference",
    "lora_w_reference",
    "opake_lora_mlp",
    "opake_lora_qkv",
    "opake_lora_w",
]
