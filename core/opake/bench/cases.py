"""What is timed: each op at one size, in the words of every provider, with the fewest bytes that it can move.

A case is data: the harness (measure.py) knows nothing about ops. Add one by a function decorated with `@case`. Liger is
imported only when asked for. Leaves out correctness, which is the tests' business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

import opake_kernels as K

__all__ = ["CASES", "Case", "case", "randn"]

Op = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One op at one size.

    arguments(small): the positional arguments with a leading example axis on those that `in_dims` maps; `small` asks
    for sizes at which the GPU's work is nothing, to time Python. diff: positions to differentiate. nbytes: fewest of
    forward plus backward. liger: imports and returns the rival, None if it has none. grouped: position of the weight
    that takes an example axis of its own in plain autograd, or positions of weights that take it as expanded views, as
    the batched engine gives it; None for ops without a weight. maps: whether it runs under vmap.
    """

    op: str
    size: str
    arguments: Callable[[bool], tuple[Any, ...]]
    diff: tuple[int, ...]
    in_dims: tuple[int | None, ...]
    nbytes: int
    torch: Op
    ours: Op
    liger: Callable[[], Op] | None = None
    grouped: int | tuple[int, ...] | None = None
    maps: bool = True


CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    """Register a case under the name of its function."""
    CASES[make.__name__] = make
    return make


def randn(*shape: int) -> torch.Tensor:
    """bf16 on the GPU, standard normal."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _gate_and_up(small: bool) -> tuple[Any, ...]:
    shape = (8, 4, 64) if small else (8, 2048, 14336)
    return randn(*shape), randn(*shape)


def _gated(op: str, reference: Op, ours: Op, liger: Callable[[], Op] | None = None) -> Case:
    # forward reads two and writes one, backward reads three and writes two
    nbytes = 8 * 8 * 2048 * 14336 * 2
    return Case(op, "16384 x 14336", _gate_and_up, (0, 1), (0, 0), nbytes, reference, ours, liger)


@case
def swiglu() -> Case:
    def liger() -> Op:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction  # pyright: ignore[reportMissingImports]

        return LigerSiLUMulFunction.apply

    return _gated("swiglu", lambda g, u: F.silu(g) * u, K.opake_swiglu, liger)


@case
def geglu_approx() -> Case:
    def liger() -> Op:
        from liger_kernel.ops.geglu import LigerGELUMulFunction  # pyright: ignore[reportMissingImports]

        return LigerGELUMulFunction.apply

    return _gated("geglu_approx", lambda g, u: F.gelu(g, approximate="tanh") * u, K.opake_geglu_approx, liger)


@case
def geglu_exact() -> Case:
    return _gated("geglu_exact", lambda g, u: F.gelu(g) * u, K.opake_geglu_exact)


@case
def swiglu_combined() -> Case:
    def arguments(small: bool) -> tuple[Any, ...]:
        return (randn(8, 4, 128) if small else randn(8, 2048, 28672),)

    def reference(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    nbytes = 8 * 8 * 2048 * 14336 * 2
    return Case("swiglu_combined", "16384 x 2*14336", arguments, (0,), (0,), nbytes, reference, K.opake_swiglu)


def _cross_entropy(op: str, V: int, T: int = 1024) -> Case:
    def arguments(small: bool) -> tuple[Any, ...]:
        T_, V_ = (4, 64) if small else (T, V)
        labels = torch.randint(0, V_, (8, T_), device="cuda")
        labels[:, ::7] = -100
        return randn(8, T_, V_), labels

    def reference(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1))

    def liger() -> Op:
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction as L  # pyright: ignore

        return lambda x, y: L.apply(x.view(-1, x.shape[-1]), y.view(-1), None, -100)[0]

    # forward reads the logits, backward reads them and writes their gradient
    nbytes = 3 * 8 * T * V * 2
    ours = K.opake_cross_entropy_loss
    return Case(op, f"{8 * T} x {V}", arguments, (0,), (0, 0), nbytes, reference, ours, liger)


@case
def cross_entropy() -> Case:
    return _cross_entropy("cross_entropy", 128256)


@case
def cross_entropy_odd() -> Case:
    return _cross_entropy("cross_entropy_odd", 50257, 2048)


@case
def selective_log_softmax() -> Case:
    def arguments(small: bool) -> tuple[Any, ...]:
        shape = (8, 4, 64) if small else (8, 1024, 128256)
        return randn(*shape), torch.randint(0, shape[-1], (*shape[:-1], 1), device="cuda")

    def reference(logits: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(logits, -1).gather(-1, indices)

    nbytes = 3 * 8 * 1024 * 128256 * 2
    ours = K.opake_selective_log_softmax
    return Case("selective_log_softmax", "8192 x 128256, K 1", arguments, (0,), (0, 0), nbytes, reference, ours)
