"""What a fused attention call looks like to the folding code, and helpers that several backends share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten
Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Backend:
    """forward(q, k, v, mask, causal, scale) -> (out, *stats); backward(go, q, k, v, mask, out, *stats, causal, scale).

    Shapes are folded: q (B, N, T, D), k and v (B, K, S, D), mask (B|1, N|1, T, S) or None. `stats` have B first.
    """

    name: str
    stats: int
    forward: Callable[..., Any]
    backward: Callable[..., Tensors]


def additive(mask: Any, dtype: torch.dtype) -> Any:
    """A mask to be added to the scores: forbidden keys are -inf, never the smallest finite number.

    With a finite number a fully masked row would attend to all keys, and the fused backward passes disagree with their
    forwards there.
    """
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    mask = mask.to(dtype)
    return mask.masked_fill(mask <= torch.finfo(dtype).min, float("-inf"))


def repeated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Keys and values with a head for every query head, and how many queries shared one."""
    groups = q.shape[1] // k.shape[1]
    return (k, v, 1) if groups == 1 else (k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), groups)


def summed(grad: torch.Tensor, groups: int) -> torch.Tensor:
    """The gradient of a key-value head from those of its repetitions."""
    return grad if groups == 1 else grad.unflatten(1, (grad.shape[1] // groups, groups)).sum(2)


def schema_matches(schemas: dict[str, list[str]], *, more: bool = False) -> bool:
    """Whether the installed torch has these aten operators with just these argument names.

    more: arguments with defaults may follow, which newer versions add.
    """
    for name, arguments in schemas.items():
        packet = getattr(aten, name, None)
        if packet is None:
            return False
        found = packet.default._schema.arguments
        rest = found[len(arguments) :]
        if [a.name for a in found[: len(arguments)]] != arguments or (rest and not more):
            return False
        if any(not a.has_default_value() for a in rest):
            return False
    return True
