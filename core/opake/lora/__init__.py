"""LoRA: layers of our own on plain torch, a driver that puts them on a model, and fusion of PEFT's layers in place.

PEFT's own state decides at every forward: what is switched, merged, dropped out or hooked after patching takes PEFT's
own code, and the reason is noted on the module. The layers here decide in the same way. Names are imported when they
are asked for; `opake.lora.axolotl` is a module of its own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapter import LinearAdapter
    from .canonical import CanonicalAdapter
    from .driver import apply_lora, disable_adapter, merge_lora, remove_lora
    from .fused import FusedLoRALinear
    from .linear import LoRALinear
    from .norm_linear import LayerNormLinear
    from .peft_files import load_peft_adapter, save_peft_adapter
    from .router import LoRATopKRouter
    from .te import TEFusedLoRALinear
    from .wrapper import AdapterWrapper

_MODULES = {
    "AdapterWrapper": "wrapper",
    "CanonicalAdapter": "canonical",
    "FusedLoRALinear": "fused",
    "LayerNormLinear": "norm_linear",
    "LinearAdapter": "adapter",
    "LoRALinear": "linear",
    "LoRATopKRouter": "router",
    "TEFusedLoRALinear": "te",
    "apply_lora": "driver",
    "disable_adapter": "driver",
    "load_peft_adapter": "peft_files",
    "merge_lora": "driver",
    "remove_lora": "driver",
    "save_peft_adapter": "peft_files",
}

__all__ = [
    "AdapterWrapper",
    "CanonicalAdapter",
    "FusedLoRALinear",
    "LayerNormLinear",
    "LinearAdapter",
    "LoRALinear",
    "LoRATopKRouter",
    "TEFusedLoRALinear",
    "apply_lora",
    "disable_adapter",
    "load_peft_adapter",
    "merge_lora",
    "remove_lora",
    "save_peft_adapter",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
