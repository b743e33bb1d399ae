"""How a case is timed: medians by device events, replayed from a CUDA graph, and Python on its own line.

plain: forward and backward of the whole batch. vmap: per-example gradients by vmap(vjp). group: the same gradients in
plain autograd, the weight carrying an example axis. Ours and torch's are captured, so that the GPU's work alone is
timed; compiled and Liger's run as they are, at sizes where the GPU is the slower part. python: wall time one more call
costs at sizes where the GPU has nothing to do, in plain autograd and under vmap(vjp).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.func import vjp, vmap

from .cases import Case, Op

__all__ = [
    "Replay",
    "captured",
    "copy_bandwidth",
    "group",
    "peak_gib",
    "per_example",
    "plain",
    "python_cost",
    "time_ms",
]


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def time_ms(fn: Callable[[], Any]) -> tuple[float, float]:
    """(median ms, peak GiB above what was allocated before); of a replay, the peak of what was captured."""
    from triton.testing import do_bench

    peak = fn.peak_gib if isinstance(fn, Replay) else peak_gib(fn)
    return float(do_bench(fn, warmup=10, rep=60, return_mode="median")), peak  # pyright: ignore


def peak_gib(fn: Callable[[], Any]) -> float:
    """The most that a call allocates at any time, in GiB; its first call, which compiles, is not counted."""
    fn()
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fn()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - base) / 2**30


def copy_bandwidth() -> float:
    """GB/s of a large device-to-device copy, bytes read plus bytes written."""
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    ms, _ = time_ms(lambda: target.copy_(source))
    return 2 * source.numel() * 2 / ms / 1e6


def plain(op: Op, args: tuple[Any, ...], diff: tuple[int, ...]) -> Callable[[], Any]:
    """Forward and backward of the whole batch in ordinary autograd."""
    leaves = [a.detach().clone().requires_grad_() if i in diff else a for i, a in enumerate(args)]
    inputs = [leaves[i] for i in diff]
    cotangents = [torch.randn_like(o) for o in _tuple(op(*leaves))]
    return lambda: torch.autograd.grad(_tuple(op(*leaves)), inputs, cotangents)


def per_example(op: Op, case: Case, args: tuple[Any, ...]) -> Callable[[], Any]:
    """Per-example gradients by vmap over vjp, eager."""
    cotangents = tuple(torch.randn_like(o) for o in _tuple(vmap(op, case.in_dims)(*args)))

    def one(cts: Any, *row: Any) -> Any:
        def of(*wanted: Any) -> Any:
            full = list(row)
            for i, leaf in zip(case.diff, wanted, strict=True):
                full[i] = leaf
            return _tuple(op(*full))

        back = vjp(of, *[row[i] for i in case.diff])[1]
        return back(cts, retain_graph=False, create_graph=False)

    mapped = vmap(one, (0, *case.in_dims))
    return lambda: mapped(cotangents, *args)


def group(op: Op, case: Case, args: tuple[Any, ...]) -> Callable[[], Any]:
    """Per-example gradients in plain autograd: the weight repeated along an example axis."""
    if case.grouped is None:
        raise ValueError(f"{case.op} has no weight to group")
    full, B = list(args), args[0].shape[0]
    if isinstance(case.grouped, int):
        full[case.grouped] = full[case.grouped].expand(B, *full[case.grouped].shape).contiguous()
        return plain(op, tuple(full), case.diff)
    for i in case.grouped:
        full[i] = full[i].expand(B, *full[i].shape)
    # a clone of an expanded view would hold a value for each example
    leaves = [a.detach().requires_grad_() if i in case.diff else a for i, a in enumerate(full)]
    inputs = [leaves[i] for i in case.diff]
    cotangents = [torch.randn_like(o) for o in _tuple(op(*leaves))]
    return lambda: torch.autograd.grad(_tuple(op(*leaves)), inputs, cotangents)


@dataclass(frozen=True)
class Replay:
    """A CUDA graph to call, the peak of what it does, and what has to stay alive for it: results and arguments."""

    graph: Any
    peak_gib: float
    held: Any

    def __call__(self) -> None:
        self.graph.replay()


def captured(fn: Callable[[], Any]) -> Replay:
    """`fn` as the replay of a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        peak = peak_gib(fn)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = fn()
    # `fn` holds the tensors that the graph reads
    return Replay(graph, peak, (kept, fn))


def python_cost(op: Op, case: Case, mapped: bool, more: int = 16) -> float:
    """Microseconds of wall time that one further call of `op`, forward and backward, costs."""
    n = len(case.in_dims)

    def times(count: int) -> float:
        # every call has arguments of its own, so that no gradients are added up
        args = tuple(a for _ in range(count) for a in case.arguments(True))

        def repeated(*inner: Any) -> Any:
            return tuple(o for i in range(count) for o in _tuple(op(*inner[i * n : i * n + n])))

        diff = tuple(i * n + d for i in range(count) for d in case.diff)
        many = replace(case, diff=diff, in_dims=case.in_dims * count)
        fn = per_example(repeated, many, args) if mapped else plain(repeated, args, diff)
        samples = []
        for _ in range(60):
            torch.cuda.synchronize()
            start = time.perf_counter()
            fn()
            samples.append(time.perf_counter() - start)
        return sorted(samples)[len(samples) // 2]

    return (times(1 + more) - times(1)) / more * 1e6
