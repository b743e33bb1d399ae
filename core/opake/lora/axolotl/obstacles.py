"""Why a LoRA layer cannot be fused, as far as it is known when it is patched.

What changes from call to call (merged, disabled, several adapters) is looked at in each forward and is no obstacle.
Dropout is one even in eval mode: the layer would be fused now and not when it is trained, which nobody would notice.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from opake.lora.layers import is_linear, read

TRANSIENT = frozenset({"adapters are disabled", "adapters are merged", "several adapters are active"})
WAYS_OUT = {
    "LoRA dropout": "set lora_dropout: 0",
    "the base bias is trainable": 'use bias="none"',
    "the base weight is trainable": "freeze it",
    "has a bias": "its projections are fused one by one",
}


def obstacle(member: Any) -> str | None:
    """Why the layer keeps PEFT's forward; None if it is fused."""
    if not is_linear(member):
        found = read(member)
        return found if isinstance(found, str) else None
    for name, dropout in member.lora_dropout.items():
        if isinstance(dropout, nn.Dropout) and dropout.p:
            return f"LoRA dropout (p={dropout.p:g} of adapter {name!r})"
    found = read(member)
    return found if isinstance(found, str) and found not in TRANSIENT else None


def has_bias(member: Any) -> bool:
    """Whether the projection adds a bias, the base's or the adapter's."""
    found = read(member)
    return not isinstance(found, str) and found.bias is not None


def way_out(reason: str) -> str:
    """What a user can do about a reason; empty if nothing is known."""
    return next((f"; {advice}" for words, advice in WAYS_OUT.items() if words in reason), "")
