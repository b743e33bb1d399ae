"""Peak live memory of a piece of code, on any device, exact to the byte and the same on every run.

A dispatch mode sees every tensor that an operator returns, below functorch, and follows its storage by a weak
reference. Tensors that were there before do not count, and neither does what a kernel allocates for itself.
"""

# ruff: noqa: TID253
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """`with LiveBytes() as live: ...`, then `live.peak` in bytes and `live.operators`, how many ran."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.operators = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._older: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for storage in _storages_of((args, kwargs)):
            if not self._made(storage):
                self._older[storage._cdata] = StorageWeakRef(storage)
        out = func(*args, **(kwargs or {}))
        self.operators += 1
        for storage in _storages_of(out):
            older = self._older.get(storage._cdata)
            # a view of what was there before is nothing new
            if (older is None or older.expired()) and not self._made(storage):
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.now())
        return out

    def _made(self, storage: torch.UntypedStorage) -> bool:
        known = self._storages.get(storage._cdata)
        return known is not None and not known[0].expired()

    def now(self) -> int:
        """Bytes of the storages made under this mode that are still alive."""
        for key in [key for key, (ref, _) in self._storages.items() if ref.expired()]:
            del self._storages[key]
        return sum(nbytes for _, nbytes in self._storages.values())


def _storages_of(value: Any) -> Iterator[torch.UntypedStorage]:
    return (leaf.untyped_storage() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def peak_live_bytes(fn: Callable[[], Any]) -> int:
    """Peak live bytes of the tensors that `fn()` makes, its result included."""
    with LiveBytes() as live:
        result = fn()
    del result
    return live.peak
