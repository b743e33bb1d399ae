"""Run modules with other tensors in the places of their parameters and buffers.

`torch.func.functional_call` leaves a module damaged when one submodule is registered under two names, as T5 does with
its embedding: it swaps the same place twice and restores the second value. Here a place is visited once, whatever its
names, and places that hold one tensor change together. Which tensors to put in is the caller's business.
"""

# ruff: noqa: TID253
from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn


class Places:
    """The places of all parameters and buffers of some modules, and the tensors in them, each once, as of now."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        index: dict[int, int] = {}
        self.tensors: list[torch.Tensor] = []
        self._places: list[tuple[dict[str, Any], str, int]] = []
        for table, name, tensor in _walk(modules):
            if id(tensor) not in index:
                index[id(tensor)] = len(self.tensors)
                self.tensors.append(tensor)
            self._places.append((table, name, index[id(tensor)]))

    @contextlib.contextmanager
    def holding(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """For the time of the block, `tensors[i]` is where `self.tensors[i]` was; afterwards what was found is back."""
        before = [table[name] for table, name, _ in self._places]
        try:
            for table, name, i in self._places:
                table[name] = tensors[i]
            yield
        finally:
            for (table, name, _), held in zip(self._places, before, strict=True):
                table[name] = held


def _walk(modules: Iterable[nn.Module]) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """(table, name, tensor) of every place, each place once."""
    seen: set[int] = set()
    for root in modules:
        for module in root.modules():
            if id(module) in seen:
                continue
            seen.add(id(module))
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        yield table, name, tensor
