"""Where a decoder layer adds, and what normalises the sum: read off the numbers of one forward.

A norm fuses with the addition before it if its input is the layer's input plus a multiple of what one submodule put
out. That tells layers that normalise first from those that normalise last, without reading their code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

TOLERANCE = 1e-5


class Seen(NamedTuple):
    """What went into a module and came out, in the order of the calls."""

    name: str
    x: torch.Tensor
    y: torch.Tensor


class Sum(NamedTuple):
    """`norm` sees the layer's input plus the output of `addend`, both names of submodules."""

    addend: str
    norm: str


def sums(model: nn.Module, run: Callable[[], Any], layers: Mapping[str, nn.Module], is_norm: Any) -> list[Sum | None]:
    """For each layer the sum that one of its norms sees, None where there is none. `run` calls the model."""
    watches = {name: _Watch(layer) for name, layer in layers.items()}
    try:
        with torch.no_grad():
            run()
    finally:
        for watch in watches.values():
            watch.close()
    return [_sum(watch, layers[name], is_norm) for name, watch in watches.items()]


class _Watch:
    def __init__(self, layer: nn.Module) -> None:
        self.x: torch.Tensor | None = None
        self.seen: list[Seen] = []
        self.handles = [layer.register_forward_pre_hook(self._enter, with_kwargs=True)]
        for name, child in layer.named_children():
            self.handles.append(child.register_forward_hook(self._leave(name), with_kwargs=True))

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.x = first_tensor(args, kwargs)

    def _leave(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            x, y = first_tensor(args, kwargs), first_tensor(output if isinstance(output, tuple) else (output,), {})
            if x is not None and y is not None:
                self.seen.append(Seen(name, x, y))

        return hook

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()


def first_tensor(args: Any, kwargs: Any) -> torch.Tensor | None:
    """The first tensor among the arguments, positional ones first; `hidden_states` before other keywords."""
    given = [*args, kwargs.get("hidden_states"), *kwargs.values()]
    return next((value.detach() for value in given if isinstance(value, torch.Tensor)), None)


def _sum(watch: _Watch, layer: nn.Module, is_norm: Callable[[nn.Module], bool]) -> Sum | None:
    if watch.x is None:
        return None
    for index, norm in enumerate(watch.seen):
        if not is_norm(getattr(layer, norm.name)) or norm.x.shape != watch.x.shape:
            continue
        # the last submodule whose output fits: a norm after attention, rather than attention
        for addend in reversed(watch.seen[:index]):
            dropped = isinstance(getattr(layer, addend.name), nn.Dropout)
            if not dropped and _is_multiple(norm.x - watch.x, addend.y):
                return Sum(addend.name, norm.name)
    return None


def _is_multiple(difference: torch.Tensor, of: torch.Tensor) -> bool:
    if difference.shape != of.shape or not difference.abs().max() > 0:
        return False
    factor = (difference * of).sum() / of.square().sum()
    return bool((difference - factor * of).norm() <= TOLERANCE * difference.norm())
