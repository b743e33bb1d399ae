"""Causality and sliding windows that the attention function applies itself, so that no mask is made for them.

A mask of a window says nothing that the two numbers T and window do not. It is left out where nobody supplied a mask,
the window is causal, and every attention layer of the model hands its window on to the attention function: that is what
Transformers' own flash attention, which never gets such a mask, relies on. Leaves out CPUs, whose kernel wants a mask.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from opake.checkpoint.step import inside_step
from opake.patching.instance import layers
from opake.patching.replace import globals_read

MASK = "attention_mask"


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """The modules whose forward takes its attention function from the public table."""
    return [module for module in model.modules() if reads_attention(module)]


def reads_attention(module: nn.Module) -> bool:
    """Whether the forward of this module takes its attention function from the public table."""
    return bool(globals_read(module, lambda value: type(value).__name__ == "AttentionInterface"))


def hands_on(model: nn.Module, keyword: str) -> bool:
    """Whether every attention layer of the model passes `keyword` to its attention function."""
    found = attention_layers(model)
    return bool(found) and all(_mentions(type(layer), keyword) for layer in found)


def needs_no_mask(model: nn.Module) -> bool:
    """Whether every attention layer hands its window and its mask on and does nothing else with the mask.

    A layer that adds keys of its own (DeepSeek-V4) extends the mask for them, and must get one.
    """
    return hands_on(model, "sliding_window") and all(_mask_uses(type(m)) == 1 for m in attention_layers(model))


def _mask_uses(cls: type[nn.Module]) -> int:
    steps = [step for fn in layers(cls.forward) for step in dis.get_instructions(fn)]
    reads = [step.argval for step in steps if step.opname.startswith("LOAD_FAST")]
    # newer interpreters read two variables in one step
    return sum(read == MASK or (isinstance(read, tuple) and MASK in read) for read in reads)


def _mentions(cls: type[nn.Module], keyword: str) -> bool:
    constants = [const for fn in layers(cls.forward) for const in fn.__code__.co_consts]
    return any(keyword == const or (isinstance(const, tuple) and keyword in const) for const in constants)


def unmasked(device: Any, T: int, S: int) -> bool:
    """Whether this call may go without a mask of a window: a step of ours on a device that has kernels for it."""
    return torch.device(device).type == "cuda" and T == S and inside_step()


def is_causal_window(mask_function: Callable[..., Any] | None, window: int | None) -> bool:
    """Whether a mask function is that of the last `window` keys (None: of all before), asked where that would show.

    Chunked attention, windows in both directions, and whatever a caller added to the mask answer otherwise.
    """
    if mask_function is None or (window is not None and window < 1):
        return False
    last = 2 if window is None else window
    # on the CPU whatever the default device is: nothing may wait for another
    zero, edge, *keys = (torch.tensor(i, device="cpu") for i in (0, last, 0, 1, last, last + 1))
    sees = [bool(mask_function(zero, zero, edge, key)) for key in keys]
    return sees == [window is None, True, True, False]
