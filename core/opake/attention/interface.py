"""Select opake's attention and mask functions for one model, through Transformers' public interfaces.

Three names are registered, one for each combination of the flags `eager_attention` and `vmap_masking`. A name always
has both an attention function and a mask function, because a missing mask function means no mask at all, in silence. A
model loaded with eager attention keeps it: that arithmetic runs under vmap as it is.
"""

from __future__ import annotations

from torch import nn

from opake import hf
from opake.masks.materialise import mask_function
from opake.patching.config import own_config
from opake.patching.undo import Skip, Undo
from opake_kernels.attention.backends import backend_names, unknown_backends

from .forward import attention_forward
from .names import NAMES, SERVED, Name, Windowed
from .windows import needs_no_mask

__all__ = ["NAMES", "Name", "fits", "lacks", "register", "remark", "replaced", "select", "unregister"]


def fits(model: nn.Module) -> Skip | None:
    """Why the attention of this model stays as it is, or None."""
    name = hf.attention_name(model)
    if not hf.selects_attention(model):
        return Skip(f"{type(model).__name__} computes attention itself (no AttentionInterface)")
    if name in (None, "eager"):
        return Skip("loaded with eager attention, which runs under vmap as it is", "stock")
    if name not in SERVED:
        return Skip(f"attention implementation {name!r} is not one that opake knows: {', '.join(SERVED[:4])}", "stock")
    return None


def remark(model: nn.Module) -> str:
    """Which kernels a transform will use for this model's attention, and what they take the place of."""
    parameter = next(model.parameters(), None)
    device = "cpu" if parameter is None else parameter.device.type
    kernels = f"inside transforms by {', '.join(backend_names(device))}"
    if unknown := unknown_backends(device):
        kernels += f" (this torch has {', '.join(unknown)} in a form that opake does not know)"
    name = hf.attention_name(model)
    return kernels if name == "sdpa" else f"{kernels}, in place of {name}"


def replaced(model: nn.Module) -> bool:
    """Whether somebody selected an implementation on a model of ours after it was patched, with masks of its own."""
    name = hf.attention_name(model)
    return not isinstance(name, Name) and name not in (None, "eager")


def lacks(model: nn.Module, *, attention: bool = False, masks: bool = False) -> bool:
    """Whether a function of ours is selected no more, and eager attention was not put in its place."""
    has = _selected(model)
    gone = (attention and not has[0]) or (masks and not has[1])
    return gone and hf.attention_name(model) not in (None, "eager")


def _selected(model: nn.Module) -> tuple[bool, bool]:
    """Whether our attention and our masks are selected."""
    now = str(hf.attention_name(model))
    return next((key for key, name in NAMES.items() if str(name) == now), (False, False))


def select(model: nn.Module, wrappers: tuple[nn.Module, ...], *, attention: bool = False, masks: bool = False) -> Undo:
    """Switch the attention or the mask function on, keeping the other as it is; the config becomes the model's own."""
    before = _selected(model)
    name = NAMES[(attention or before[0], masks or before[1])]
    if name == str(NAMES[True, True]) and needs_no_mask(model):
        name = Windowed(name)
    register()
    undo = own_config(model, wrappers)
    for config in hf.configs(model.config):
        if config._attn_implementation in SERVED:
            config._attn_implementation_internal = name
    return undo


def register() -> None:
    """Put our functions into the public tables under all names; a no-op if they are there."""
    stock_attention, stock_mask = hf.attention_functions()["sdpa"], hf.mask_functions()["sdpa"]
    for (attention, masks), name in NAMES.items():
        hf.attention_functions()[name] = attention_forward if attention else stock_attention
        hf.mask_functions()[name] = mask_function if masks else stock_mask


def unregister() -> None:
    """Take our names out of the public tables."""
    for name in NAMES.values():
        hf.attention_functions().pop(name, None)
        hf.mask_functions().pop(name, None)
