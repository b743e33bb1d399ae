"""Normalised rows are computed again in the backward instead of being kept, in steps of the batched engine.

A norm keeps its input; the projections behind it keep its output for the gradients of their adapters, as much memory
again in every layer. A patched norm therefore offers a recipe for its output, and where autograd is about to save that
very tensor it keeps the recipe. One kernel at the speed of memory is the price. Leaves out transforms, where saved
tensors cannot be exchanged, and anything but norms.
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_active: contextvars.ContextVar[Recipes | None] = contextvars.ContextVar("opake_recipes", default=None)


class Recipe(NamedTuple):
    """How to make a tensor again, what it looked like, and the last one made, as long as somebody holds it."""

    make: Callable[[], torch.Tensor]
    shape: torch.Size
    made: list[weakref.ref[torch.Tensor]]


class Recipes:
    """Recipes of the tensors that are alive now, by their storage."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, int, Recipe]] = {}

    def offer(self, out: torch.Tensor, make: Callable[[], torch.Tensor]) -> None:
        # a recipe holds what it works on, so it must not outlive its tensor
        self._known = {key: entry for key, entry in self._known.items() if not entry[0].expired()}
        storage = out.untyped_storage()
        recipe = Recipe(make, out.shape, [])
        self._known[storage._cdata] = (StorageWeakRef(storage), out._version, recipe)

    def pack(self, tensor: torch.Tensor) -> Any:
        entry = self._known.get(tensor.untyped_storage()._cdata)
        if entry is not None and not entry[0].expired() and entry[1] == tensor._version:
            whole = tensor.numel() == entry[2].shape.numel() and tensor.is_contiguous()
            if whole:
                return tensor.shape, entry[2]
        # the tensor itself would be a cycle where it is an output
        return tensor.detach() if tensor.requires_grad else tensor


def unpack(kept: Any) -> torch.Tensor:
    """The tensor, or one made by its recipe."""
    if isinstance(kept, torch.Tensor):
        return kept
    shape, recipe = kept
    # several projections read the rows of one norm, one after the other
    out = recipe.made[-1]() if recipe.made else None
    if out is None:
        with torch.no_grad():
            out = recipe.make()
        recipe.made[:] = [weakref.ref(out)]
    return out.view(shape)


@contextlib.contextmanager
def recomputed_norms() -> Iterator[None]:
    """For the time of the block, patched norms are asked for recipes, and the backward makes their rows again."""
    recipes = Recipes()
    token = _active.set(recipes)
    try:
        with torch.autograd.graph.saved_tensors_hooks(recipes.pack, unpack):
            yield
    finally:
        _active.reset(token)


def offer(out: torch.Tensor, op: Callable[..., torch.Tensor], *inputs: Any, **options: Any) -> torch.Tensor:
    """`out`, which is `op(*inputs, **options)`; from now on it may be made again where that saves memory."""
    # torch.compile cannot read a context variable, and makes things again by itself
    if torch.compiler.is_compiling():
        return out
    recipes = _active.get()
    if recipes is not None and torch.is_grad_enabled():
        fixed = [x.detach() if isinstance(x, torch.Tensor) else x for x in inputs]
        recipes.offer(out, lambda: op(*fixed, **options))
    return out
