"""The one product of a router that makes its logits: found by its weight, and the adapter's term added to it there.

A router's forward is its own: it may cast, jitter, add a bias, take softmax or sigmoid, choose experts and return the
three in any order. For the length of one call, the linear product with the router's weight (or with a cast of it)
returns the sum with the adapter's term instead, and everything after it sees the sum. The term is computed from the
very rows that the product got, so a jitter is drawn once and shared. Nothing is stored on the router, and nothing is
seen by other threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from opake.errors import InputError

CASTS = frozenset({"to", "type", "type_as", "float", "double", "half", "bfloat16"})
TURNS = frozenset({"t", "transpose"})
PRODUCTS = frozenset({"matmul", "mm", "__matmul__"})
COUNTS = ("num_experts", "n_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "n_expert")


def gating_module(router: nn.Module) -> tuple[str, nn.Module]:
    """(name below the router, module) that holds the weight (E, H) of the logits: the router itself or a linear in it.

    Raises:
        InputError: no such weight, or several.
    """
    own = router._parameters.get("weight")
    if own is not None and own.dim() == 2:
        return "", router
    found = [(name, module) for name, module in router.named_modules() if isinstance(module, nn.Linear)]
    if len(found) > 1:
        counts = {getattr(router, name, None) for name in COUNTS} - {None}
        found = [(name, module) for name, module in found if module.out_features in counts]
    if len(found) != 1:
        raise InputError(
            f"{type(router).__name__} has no single weight (experts, hidden) that makes its logits, but "
            f"{len(found)} linear layers that might; wrap the right one with LoRALinear"
        )
    return found[0]


class AddToLogits(TorchFunctionMode):
    """Within the block, `functional.linear(rows, weight)` is that plus `delta(rows)`, in the dtype of the logits.

    `times`: how often that happened.
    """

    def __init__(self, weight: torch.Tensor, delta: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.times = 0
        self._delta = delta
        # kept by reference: an id is only as good as its object lives
        self._weights, self._turned = [weight], []

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if func is functional.linear:
            rows, weight = _two(args, kwargs, "input", "weight")
            return self._plus(result, rows) if _among(weight, self._weights) else result
        if name in PRODUCTS and len(args) == 2:
            return self._plus(result, args[0]) if _among(args[1], self._turned) else result
        if name in CASTS and _among(args[0], self._weights):
            self._weights.append(result)
        elif (name in TURNS or name == "__get__") and args and _among(args[0], self._weights):
            self._note_turn(args[0], result)
        return result

    def _note_turn(self, weight: torch.Tensor, result: Any) -> None:
        if isinstance(result, torch.Tensor) and result.shape == weight.mT.shape and result.stride() != weight.stride():
            self._turned.append(result)

    def _plus(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        self.times += 1
        return logits + self._delta(rows).to(logits.dtype)


def _two(args: tuple[Any, ...], kwargs: Any, *names: str) -> tuple[Any, ...]:
    return tuple(args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names))


def _among(tensor: Any, tensors: list[torch.Tensor]) -> bool:
    return any(tensor is each for each in tensors)
