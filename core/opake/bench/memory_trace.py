"""Which part of a model made the tensors that a step keeps: live storages, labelled by the module that was running.

A dispatch mode sees every tensor below functorch; hooks on all modules say whose forward is at work. What is alive when
the backward starts is what the forward keeps; what is alive at the peak includes what the backward needs besides.
Leaves out what a kernel allocates for itself, and tensors that were there before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BACKWARD, LAYER, OUTSIDE = "backward", "layer", "step"


class MemoryTrace(TorchDispatchMode):
    """`with MemoryTrace(model) as trace: step()`, then `trace.kept` and `trace.at_peak`: bytes by part of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.kept: Counter[str] = Counter()
        self.at_peak: Counter[str] = Counter()
        self.peak = 0
        self._parts = {id(module): part_of(name) for name, module in model.named_modules()}
        self._running: list[str] = []
        self._alive: dict[int, tuple[StorageWeakRef, int, str]] = {}
        self._older: dict[int, StorageWeakRef] = {}
        self._turned = False

    def __enter__(self) -> MemoryTrace:
        self._handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._running.append(self._parts.get(id(module), OUTSIDE))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        backward = torch._C._current_graph_task_id() != -1 and not self._running
        if backward and not self._turned:
            self._turned = True
            self.kept = self._now()
        for storage in _storages((args, kwargs)):
            if not self._made(storage):
                self._older[storage._cdata] = StorageWeakRef(storage)
        out = func(*args, **(kwargs or {}))
        part = self._running[-1] if self._running else BACKWARD if backward else OUTSIDE
        for storage in _storages(out):
            older = self._older.get(storage._cdata)
            if (older is None or older.expired()) and not self._made(storage):
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes(), part)
        now = self._now()
        if sum(now.values()) > self.peak:
            self.peak, self.at_peak = sum(now.values()), now
        return out

    def _made(self, storage: torch.UntypedStorage) -> bool:
        known = self._alive.get(storage._cdata)
        return known is not None and not known[0].expired()

    def _now(self) -> Counter[str]:
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        found: Counter[str] = Counter()
        for _, nbytes, part in self._alive.values():
            found[part] += nbytes
        return found


def part_of(name: str) -> str:
    """The part of a model that a module belongs to: its place within its layer, else its own last name."""
    steps = name.split(".")
    numbers = [i for i, step in enumerate(steps) if step.isdecimal()]
    if not numbers:
        return steps[-1] or OUTSIDE
    inside = steps[numbers[0] + 1 :]
    return inside[0] if inside else LAYER


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    return (leaf.untyped_storage() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
