"""CUDA graphs of one microbatch step: forward, per-example gradients, norms, clipping and sum, replayed in one launch.

A graph is captured when a step of the same form comes for the second time: the first run warms kernels up. What it was
captured with is its key - shapes and dtypes of the rows, addresses of every tensor of the model, every plain value and
object that its modules and configs hold, the patch report, numeric settings of torch - so a change of any of these
leads to another graph, never to a stale one. At most `MOST` graphs are kept, in one memory pool. Nothing is read on the
host. A step that cannot be captured runs eagerly from then on, and the reason is kept.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from opake.functional.rows import Rows
from opake_kernels.clip_sum import release_tables, reserve_tables

MOST = 4
Body = Callable[[Rows, torch.Tensor], tuple[torch.Tensor, ...]]


@dataclass
class Graph:
    """A captured step: its inputs, its outputs and the host tables that it copies from."""

    graph: torch.cuda.CUDAGraph
    leaves: list[Any]
    real: torch.Tensor
    outputs: tuple[torch.Tensor, ...]
    tables: list[torch.Tensor]

    def __call__(self, rows: Rows, real: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for held, given in zip(self.leaves, rows.leaves, strict=True):
            if isinstance(held, torch.Tensor):
                held.copy_(given, non_blocking=True)
        self.real.copy_(real, non_blocking=True)
        self.graph.replay()
        # the next replay overwrites them
        return tuple(output.clone() for output in self.outputs)


class Capturer:
    """Runs steps of one target, captured where they can be."""

    def __init__(self) -> None:
        self._graphs: OrderedDict[Hashable, Graph | str] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._pool: Any = None
        self.reason = ""

    def __call__(self, key: Hashable, body: Body, rows: Rows, real: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`body(rows, real)`, by a graph from the second time on; `key` says all that the graph depends on."""
        held = self._graphs.get(key)
        if isinstance(held, Graph):
            self._graphs.move_to_end(key)
            self.reason = "captured in a CUDA graph"
            return held(rows, real)
        if isinstance(held, str):
            self.reason = held
            return body(rows, real)
        if key not in self._seen:
            self._seen[key] = None
            while len(self._seen) > 64:
                self._seen.popitem(last=False)
            self.reason = "first step of this form, which warms up; the next one is captured"
            return body(rows, real)
        return self._capture(key, body, rows, real)

    def _capture(self, key: Hashable, body: Body, rows: Rows, real: torch.Tensor) -> tuple[torch.Tensor, ...]:
        while len(self._graphs) >= MOST:
            self._graphs.popitem(last=False)
        try:
            made = self._graphs[key] = self._record(body, rows, real)
        except Exception as error:  # whatever a kernel or a module objects to, the eager step still serves
            root = _first(error)
            self._graphs[key] = self.reason = f"not captured: {type(root).__name__}: {str(root).splitlines()[0]}"
            return body(rows, real)
        self.reason = "captured in a CUDA graph"
        return made(rows, real)

    def _record(self, body: Body, rows: Rows, real: torch.Tensor) -> Graph:
        device = real.device
        leaves = [x.clone() if isinstance(x, torch.Tensor) else x for x in rows.leaves]
        held, still = replace(rows, leaves=leaves), real.clone()
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        tables, graph = reserve_tables(16, 1 << 14), torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.device(device), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = body(held, still)
        finally:
            release_tables()
        return Graph(graph, leaves, still, outputs, tables)


def _first(error: BaseException) -> BaseException:
    """The error that spoiled a capture; ending the capture raises another one on top of it."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def key_of(params: Mapping[str, torch.Tensor], rows: Rows, model: Hashable) -> Hashable:
    """All that a captured step depends on besides the contents of its inputs; `model`: the state `Watch` found."""
    shapes = tuple(_form(leaf) for leaf in rows.leaves)
    given = tuple((name, p.data_ptr(), p.dtype, p.shape) for name, p in params.items())
    return (shapes, str(rows.spec), given, model, _settings())


def _form(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    return leaf if isinstance(leaf, Hashable) else repr(leaf)


def _settings() -> Hashable:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    )
