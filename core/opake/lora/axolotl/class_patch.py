"""`patch_self_attn_lora`: fused LoRA for every instance of one attention class, by the only change to a class there is.

The class gets a forward that hands the original one a view of the instance, in which the projections with adapters are
fused. Nothing is kept on instances; those without adapters run the original on themselves. So nothing depends on how
the forward is written, and taking it back is putting one function back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from opake.errors import ProjectionsNotFound, RestoreConflict
from opake.lora.layers import is_projection
from opake.patching.undo import Undo, conflicts, put

from .attention_class import get_attention_cls_from_config
from .made import attributes_made, projects_in
from .originals import OUTPUTS
from .settings import switch
from .view import carry_back, view_of


@dataclass(slots=True, eq=False)
class ClassPatch:
    """The change to one class. `on` is looked at in each forward, by closures that outlive a restore too."""

    undo: Undo
    on: bool = True


_patched: dict[type, ClassPatch] = {}


def patch_self_attn_lora(cfg: Any) -> None:
    """Fuse the LoRA projections of every instance of the attention class of `cfg.base_model`, present and future.

    cfg: a mapping or an object with base_model; lora_qkv_kernel or lora_o_kernel set to False leaves those out

    This class alone changes: `forward`, and `_original_forward`, which is the function that was there. A second call
    does nothing. `restore(cls)` takes it back. Where there is a model already, `apply_lora_kernel_patches` does the
    same for that model only.

    Raises:
        InputError, AttentionClassNotFound: as of `get_attention_cls_from_config`.
        ProjectionsNotFound (an AssertionError): the class has no projections of a known kind. Nothing has changed then.
    """
    parts = tuple(key for key in ("qkv", "o") if switch(cfg, f"lora_{key}_kernel") is not False)
    cls = get_attention_cls_from_config(cfg)
    if cls in _patched:
        return
    _require_projections(cls)
    patch = ClassPatch(Undo())
    inner: Any = cls.forward
    ours = _around(inner, patch, parts)
    where = f"{cls.__module__}.{cls.__qualname__}"
    patch.undo.changes.append(put(cls, "_original_forward", inner, where=f"{where}._original_forward"))
    patch.undo.changes.append(put(cls, "forward", ours, where=f"{where}.forward"))
    _patched[cls] = patch


def restore(cls: type) -> None:
    """Take the change to one class back; a class that was not patched is left alone."""
    patch = _patched.get(cls)
    if patch is None:
        return
    if clashes := conflicts([patch.undo]):
        raise RestoreConflict(f"{cls.__qualname__} cannot be restored: {clashes[0]}; take that change off first")
    patch.undo()
    patch.on = False
    del _patched[cls]


def patched_classes() -> list[type]:
    """Every class that is changed now."""
    return list(_patched)


def _around(inner: Callable[..., Any], patch: ClassPatch, parts: tuple[str, ...]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        adapted = patch.on and any(is_projection(member) for member in self._modules.values())
        if not adapted or torch.compiler.is_compiling():
            return inner(self, *args, **kwargs)
        view = view_of(self, parts)
        try:
            return inner(view, *args, **kwargs)
        finally:
            carry_back(view, self)

    return forward


def _require_projections(cls: type) -> None:
    """Refuse a class whose constructors make no projection of queries, keys and values, or none of the output."""
    made = attributes_made(cls)
    inputs, outputs = projects_in(cls), made & set(OUTPUTS)
    if not inputs or not outputs:
        lacking = "query, key and value" if not inputs else "the output"
        raise ProjectionsNotFound(
            f"{cls.__module__}.{cls.__qualname__} makes no projection of {lacking} under a known name; it makes "
            f"{', '.join(sorted(made)) or 'nothing'}. Patch the loaded model with apply_lora_kernel_patches(model, cfg)"
        )
