"""axolotl's kernel patches, by its names: change the import line of a script and nothing else.

    from opake.lora.axolotl import apply_lora_kernel_patches, patch_self_attn_lora

The functions take what axolotl's documentation says and raise what it says. What they do is what the rest of opake
does: fused ops on the instances of one model, decided again at every forward, reported and undone. `restore` takes it
back; `kernel_report` says what was fused and what was not, and why.
"""

from __future__ import annotations

from .attention_class import get_attention_cls_from_config
from .class_patch import patch_self_attn_lora
from .kernels import apply_lora_kernel_patches, kernel_report
from .originals import original_apply_o, original_apply_qkv
from .restoring import restore

__all__ = [
    "apply_lora_kernel_patches",
    "get_attention_cls_from_config",
    "kernel_report",
    "original_apply_o",
    "original_apply_qkv",
    "patch_self_attn_lora",
    "restore",
]
