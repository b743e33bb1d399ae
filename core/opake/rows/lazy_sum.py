"""A sum that is not taken yet: so that a decoder layer's own code, unchanged, ends in one fused add + RMSNorm.

The attention module's output is handed on as `Pending`; `residual + pending` makes a `Sum`; the norm that is called on
the sum adds and normalises in one kernel and settles it. Whatever else touches either of them gets an ordinary tensor:
both answer every torch function by taking the sum first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

ADDITIONS = frozenset({torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__})
SCALINGS = frozenset({torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__, F.dropout})


class Lazy:
    """A stand-in for a tensor that is computed when anything but the fused path asks for it."""

    def tensor(self) -> torch.Tensor:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor(), name)

    def __add__(self, other: Any) -> Any:
        return self.tensor() + plain(other)

    def __radd__(self, other: Any) -> Any:
        return plain(other) + self.tensor()

    def __mul__(self, other: Any) -> Any:
        return self.tensor() * plain(other)

    __rmul__ = __mul__

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.tensor()[index]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*(plain(a) for a in args), **{k: plain(v) for k, v in (kwargs or {}).items()})


class Pending(Lazy):
    """A tensor that is about to be added to a residual stream."""

    def __init__(self, addend: torch.Tensor) -> None:
        self.addend = addend

    def tensor(self) -> torch.Tensor:
        return self.addend

    def __radd__(self, other: Any) -> Any:
        return _sum(plain(other), self.addend)

    def __mul__(self, other: Any) -> Any:
        return Pending(self.addend * plain(other))

    __rmul__ = __mul__

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in ADDITIONS and len(args) == 2 and not kwargs and isinstance(args[1], Pending):
            return _sum(plain(args[0]), args[1].addend)
        result = super().__torch_function__(func, types, args, kwargs)
        return Pending(result) if func in SCALINGS else result


class Sum(Lazy):
    """`residual + addend`, taken once: by the norm that is called on it, or by whoever needs it first."""

    def __init__(self, residual: torch.Tensor, addend: torch.Tensor) -> None:
        self.residual, self.addend = residual, addend
        self._total: torch.Tensor | None = None

    def tensor(self) -> torch.Tensor:
        if self._total is None:
            self._total = self.residual + self.addend
        return self._total

    def settle(self, total: torch.Tensor) -> None:
        """Take over a sum that was computed on the way."""
        self._total = total


def _sum(residual: torch.Tensor, addend: torch.Tensor) -> Any:
    """A Sum where the fused op serves it, else the plain sum."""
    same = residual.shape == addend.shape and residual.dtype == addend.dtype and residual.device == addend.device
    return Sum(residual, addend) if same else residual + addend


def plain(value: Any) -> Any:
    """The tensor behind a stand-in; anything else as it is."""
    return value.tensor() if isinstance(value, Lazy) else value
