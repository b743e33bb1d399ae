"""The universal engine: `vmap` over the vector-Jacobian product of one row's loss.

`torch.func.grad` always builds the graph of a double backward and keeps every activation for it; `vjp`, called without
that graph, needs about a third of the memory for the same gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.func import vjp, vmap
from torch.utils._pytree import tree_map_only

from opake.functional.chunk import Chunk, Engine
from opake.functional.rows import Rows
from opake.functional.target import Target


def build(target: Target, randomness: str) -> Engine:
    """The engine for `target`; `randomness` as in `torch.vmap`."""

    def run(params: Mapping[str, torch.Tensor], rows: Rows) -> Chunk:
        def one_row(params: dict[str, torch.Tensor], leaves: list[Any]) -> tuple:
            args, kwargs = rows.rebuild(leaves)
            loss, pull, aux = cast(tuple, vjp(lambda p: target.loss(p, args, kwargs), params, has_aux=True))
            # without these two, which torch does not document, the whole graph would be kept
            (grads,) = pull(torch.ones_like(loss), retain_graph=False, create_graph=False)
            return grads, loss, aux

        # functorch differentiates inside regardless; outside, captured tensors must not grow a graph of their own
        watch = target.watch
        ahead = contextlib.nullcontext() if watch is None else watch.adapters_ahead(params)
        with torch.no_grad(), ahead:
            mapped = vmap(one_row, in_dims=(None, rows.dims), randomness=randomness)
            grads, losses, aux = mapped(dict(params), rows.leaves)
        # aux may hand a row straight through
        return Chunk(grads, losses, tree_map_only(torch.Tensor, torch.Tensor.detach, aux))

    return run
