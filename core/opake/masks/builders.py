"""Masks of models that cannot be given our mask function by name: eager attention, and attention written out by hand.

Their mask builders run as they are, with a table of mask functions of their own in which no function looks whether a
mask that was supplied could be left out. Which functions are in the table, and what they compute, stays Transformers'
business: eager masks are additive as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from opake import hf
from opake.attention import eager, interface, windows
from opake.patching.instance import rebind
from opake.patching.replace import globals_read, overlay, readers
from opake.patching.undo import Undo

TABLE = "ALL_MASK_ATTENTION_FUNCTIONS"


class MaterialisedMasks:
    """The public table of mask functions, each told to make a mask whenever one is supplied."""

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return functools.partial(materialised, hf.mask_functions()[name])


def materialised(
    stock: Callable[..., Any],
    *args: Any,
    attention_mask: Any = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> Any:
    """`stock`, allowed to leave the mask out where none was supplied, whatever a supplied one says."""
    absent = attention_mask is None
    return stock(
        *args,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip and absent,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip and absent,
        **kwargs,
    )


class ImpliedMasks:
    """As `MaterialisedMasks`, for attention that knows causality and its window: no mask where nobody supplied one."""

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return functools.partial(implied, hf.mask_functions()[name])


def implied(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """None for causal attention without padding in a step of ours, with or without a window; else `materialised`."""
    T, S = kwargs.get("q_length", 0), kwargs.get("kv_length", 1)
    skips = kwargs.get("attention_mask") is None and kwargs.get("allow_is_causal_skip", True)
    if skips and windows.unmasked(kwargs.get("device", "cpu"), T, S):
        skips = windows.is_causal_window(kwargs.get("mask_function"), kwargs.get("local_size"))
        return None if skips else materialised(stock, *args, **kwargs)
    return materialised(stock, *args, **kwargs)


def sites(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that build masks."""
    if interface.fits(model) is not None:
        yield from readers(model, _is_builder)


def apply(module: nn.Module) -> Undo:
    read = globals_read(module, _is_builder)
    # the attention layers lie below the module that makes their masks
    knowing = eager.overlaid(module) and windows.needs_no_mask(module)
    return overlay(module, {name: _rebound(builder, knowing) for name, builder in read.items()})


@functools.cache
def _rebound(builder: Callable[..., Any], knowing: bool) -> Callable[..., Any]:
    rebound = rebind(builder, {TABLE: ImpliedMasks() if knowing else MaterialisedMasks()})
    assert rebound is not None, "asked by _is_builder"
    return rebound


def _is_builder(value: Any) -> bool:
    return callable(value) and getattr(value, "__module__", "") == hf.masking_module() and _reads_table(value)


@functools.cache
def _reads_table(value: Callable[..., Any]) -> bool:
    return rebind(value, {TABLE: None}) is not None
