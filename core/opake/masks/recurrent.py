"""The padding mask of recurrent layers (linear attention, Mamba, short convolutions), whatever its values say.

Transformers drops a mask of ones after reading all of it. Here a mask that is supplied is used: to multiply by one
changes nothing. Before 5.15 some families also ignored the mask of a batch of one row, which is what every row is
inside `vmap`; there it is applied. What else the layers do with the mask is theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from opake.patching.instance import wrap_method
from opake.patching.replace import globals_read, overlay
from opake.patching.undo import Skip, Undo
from opake.transforms import inside_transform

# where Transformers decides about the mask: a function of masking_utils, or (before 5.13) a method of the text model
FUNCTION = "create_recurrent_attention_mask"
METHODS = ("_update_linear_attn_mask", "_update_mamba_mask")
# where it is applied
APPLY = "apply_mask_to_padding_states"


def sites(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that decide about the mask, and those that would ignore the mask of one row; patched ones too."""
    for name, module in model.named_modules():
        if globals_read(module, lambda value: _is_stock(value) or _is_ours(value)) or _methods(module):
            yield name, module


def fits(record: object, module: nn.Module) -> Skip | None:
    if globals_read(module, _is_stock) or _methods(module):
        return None
    if globals_read(module, _is_ours):
        return Skip("the core has replaced it", "already")
    return Skip(f"{type(module).__name__}.forward makes no recurrent mask", "stock")


def apply(record: object, module: nn.Module) -> Undo:
    names: dict[str, Any] = {}
    for name, stock in globals_read(module, _is_stock).items():
        names[name] = recurrent_mask if _name(stock) == FUNCTION else functools.partial(mask_padding, stock)
    changes = overlay(module, names).changes if names else []
    return Undo(changes + [wrap_method(module, name, _method) for name in _methods(module)])


def recurrent_mask(
    config: Any, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None, *args: Any, **kwargs: Any
) -> torch.Tensor | None:
    """(B, T) padding mask of the last T positions, T of inputs_embeds (B, T, H); None without one and for one token."""
    T = inputs_embeds.shape[1]
    if attention_mask is None or attention_mask.dim() != 2 or T == 1:
        return None
    return attention_mask[:, -T:].contiguous()


def mask_padding(
    stock: Callable[..., torch.Tensor], hidden_states: torch.Tensor, attention_mask: torch.Tensor | None
) -> torch.Tensor:
    """hidden_states (B, T, H) with zeros where attention_mask (B, T) is 0, inside transforms; `stock` elsewhere."""
    if attention_mask is None or attention_mask.shape[1] == 1 or not inside_transform():
        return stock(hidden_states, attention_mask)
    return (hidden_states * attention_mask[:, :, None]).to(hidden_states.dtype)


def ignores_mask_of_one_row(model: nn.Module) -> bool:
    """Whether the unpatched model computes something else for a padded row alone than for two of it."""
    return any(
        globals_read(module, lambda value: _name(value) == APPLY and _is_stock(value)) for module in model.modules()
    )


def _method(inner: Callable[..., Any], self: nn.Module, attention_mask: Any, cache: Any) -> Any:
    return None if cache is not None and cache.has_previous_state() else attention_mask


def _methods(module: nn.Module) -> list[str]:
    return [name for name in METHODS if hasattr(type(module), name)]


def _is_stock(value: Any) -> bool:
    return _name(value) == FUNCTION or (_name(value) == APPLY and _ignores_one_row(value))


def _is_ours(value: Any) -> bool:
    return value is recurrent_mask or getattr(value, "func", None) is mask_padding


def _name(value: Any) -> str:
    theirs = callable(value) and str(getattr(value, "__module__", "")).startswith("transformers.")
    return getattr(value, "__name__", "") if theirs else ""


@functools.cache
def _ignores_one_row(stock: Callable[..., torch.Tensor]) -> bool:
    return bool(stock(torch.ones(1, 2, 1), torch.zeros(1, 2)).any())
