"""Run modules with other tensors in the places of their parameters and buffers.

`torch.func.functional_call` leaves a module damaged when one submodule is registered under two names, as T5 does with
its embedding: it swaps the same place twice and restores the second value. Here a place is visited once, whatever its
names, and places that hold one tensor change together. Which tensors to put in is the caller's business.
"""

# ruff: noqa: TID253
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn


class Places:
    """The places of all parameters and buffers of some modules, and the tensors in them, each once, as of now.

    `names` are the dotted names of the parameters below a single module, aliases included, with their index.
    """

    def __init__(self, *modules: nn.Module) -> None:
        self.tensors: list[torch.Tensor] = []
        self.names: dict[str, int] = {}
        self._places: list[tuple[dict[str, Any], str, int]] = []
        self._walk(modules)

    def _walk(self, modules: tuple[nn.Module, ...]) -> None:
        # a stack and not `named_modules`, whose nested generators take ten times as long on a deep model
        stack = [("", module) for module in reversed(modules)]
        seen: set[int] = set()
        index: dict[int, int] = {}
        while stack:
            prefix, module = stack.pop()
            new = id(module) not in seen
            seen.add(id(module))
            # most modules of a deep model hold nothing themselves
            if module._parameters:
                self._take(prefix, module._parameters, index, new=new, named=True)
            if module._buffers:
                self._take(prefix, module._buffers, index, new=new, named=False)
            if module._modules:
                children = reversed(module._modules.items())
                stack.extend([(f"{prefix}{name}.", child) for name, child in children if child is not None])

    def _take(self, prefix: str, table: Any, index: dict[int, int], *, new: bool, named: bool) -> None:
        for name, tensor in table.items():
            if tensor is None:
                continue
            i = index.setdefault(id(tensor), len(self.tensors))
            if i == len(self.tensors):
                self.tensors.append(tensor)
            if new:
                self._places.append((table, name, i))
            if named:
                self.names[prefix + name] = i

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
