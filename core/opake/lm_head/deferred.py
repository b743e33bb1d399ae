"""Logits that are not computed: what a head returns in a loss-only call, in the place of a tensor (..., V).

The model's own forward goes on with it: it may be scaled, soft-capped, cast, sliced and reshaped in the leading
dimensions, and a cross-entropy of it becomes the fused one over hidden states. So a forward is never copied, and scales
and caps are found where the model applies them. Anything else computes the logits after all, with the reason noted;
from then on every one of these objects is the tensor that stock code would have had, in-place changes included. So a
head or a loss of a kind unknown here costs memory and never a wrong number.
"""

# a stand-in for tensors has to know torch
# ruff: noqa: TID253
from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from opake_kernels.cross_entropy import opake_cross_entropy_loss

from .head import PLAIN, Head, Scaling
from .losses import cross_entropy, opake_cross_entropy


class DeferredLogits:
    """Logits (..., V) of `hidden` (..., H) under `head`, after `scaling`; see the module."""

    def __init__(
        self,
        head: Head,
        hidden: torch.Tensor,
        dtype: torch.dtype,
        scaling: Scaling = PLAIN,
        replay: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        self.head, self.hidden, self.dtype, self.scaling = head, hidden, dtype, scaling
        self.replay = replay or head.compute
        self.tensor: torch.Tensor | None = None
        head.nodes.append(weakref.ref(self))

    def _then(self, op: Callable[[Any], Any], **changes: Any) -> DeferredLogits:
        """The result of `op`, which changes this much of the state; `op` is replayed should the logits be computed."""
        state = {"hidden": self.hidden, "dtype": self.dtype, "scaling": self.scaling, **changes}
        return DeferredLogits(self.head, replay=lambda: op(self.value("")), **state)

    def value(self, reason: str) -> torch.Tensor:
        """The logits as a tensor, computed now if they were not yet."""
        if self.tensor is None:
            self.head.materialise(reason)
        assert self.tensor is not None, "materialise fills every node that is alive"
        return self.tensor

    # what can be known without the logits

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.head.weight.shape[-2]))

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def ndim(self) -> int:
        return self.hidden.dim()

    @property
    def is_cuda(self) -> bool:
        return self.hidden.is_cuda

    @property
    def requires_grad(self) -> bool:
        return torch.is_grad_enabled() and (self.hidden.requires_grad or self.head.weight.requires_grad)

    def dim(self) -> int:
        return self.hidden.dim()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def is_floating_point(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype}, computed={self.tensor is not None})"

    # what can be done without the logits

    def float(self) -> Any:
        return self.to(torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        dtype = kwargs.get("dtype", args[0] if args else None)
        lone = len(args) + len(kwargs) == 1
        if self.tensor is None and lone and dtype in (torch.float32, self.dtype):
            return self._then(lambda t: t.to(dtype), dtype=dtype)
        if self.tensor is None and lone and (args or [kwargs.get("device")])[0] in (self.device, str(self.device)):
            return self
        return self.value("the logits are cast or moved").to(*args, **kwargs)

    def contiguous(self, *args: Any, **kwargs: Any) -> Any:
        if self.tensor is None and not args and not kwargs:
            return self._then(lambda t: t.contiguous())
        return self.value("the logits are laid out anew").contiguous(*args, **kwargs)

    def squeeze(self, dim: int) -> Any:
        if self.tensor is None and -self.ndim <= dim < self.ndim and dim % self.ndim != self.ndim - 1:
            at = dim % self.ndim
            return self._then(lambda t: t.squeeze(at), hidden=self.hidden.squeeze(at))
        return self.value("the logits are squeezed").squeeze(dim)

    def view(self, *shape: Any) -> Any:
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        keeps = self.tensor is None and len(sizes) > 1 and sizes[-1] == self.shape[-1]
        if keeps and all(isinstance(size, int) for size in sizes):
            hidden = self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1])
            return self._then(lambda t: t.reshape(*sizes), hidden=hidden)
        return self.value("the vocabulary dimension is reshaped").view(*shape)

    def reshape(self, *shape: Any) -> Any:
        return self.view(*shape)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        if self.tensor is None and end_dim % self.ndim < self.ndim - 1:
            flat = self.hidden.flatten(start_dim, end_dim % self.ndim)
            return self._then(lambda t: t.flatten(start_dim, end_dim), hidden=flat)
        return self.value("the vocabulary dimension is flattened").flatten(start_dim, end_dim)

    def __getitem__(self, index: Any) -> Any:
        if self.tensor is None and _spares_the_last(index, self.ndim):
            return self._then(lambda t: t[index], hidden=self.hidden[index])
        return self.value("single logits are looked at")[index]

    def tanh(self) -> Any:
        if self.tensor is None and not self.scaling.capped:
            return self._then(lambda t: t.tanh(), scaling=Scaling(self.scaling.before, True, 1.0))
        return self.value("the logits are capped twice").tanh()

    def __mul__(self, other: Any) -> Any:
        if self.tensor is None and _is_factor(other):
            return self._then(lambda t: t * other, scaling=self.scaling.times(float(other)))
        return self.value("the logits are scaled by a tensor") * _real(other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        if self.tensor is None and _is_factor(other):
            return self._then(lambda t: t / other, scaling=self.scaling.times(1.0 / float(other)))
        return self.value("the logits are scaled by a tensor") / _real(other)

    mul, div = __mul__, __truediv__

    # everything else

    def __getattr__(self, name: str) -> Any:
        # called only for what is not defined above; a name with underscores is no public attribute of a tensor
        if name.startswith("_") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.value(f"{name} of the logits is asked for"), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        handler = _FUNCTIONS.get(func) if args and isinstance(args[0], cls) else None
        found = NotImplemented if handler is None else handler(*args, **kwargs)
        if found is not NotImplemented:
            return found
        name = getattr(func, "__name__", str(func))
        return func(*tree_map(lambda v: _real(v, name), args), **tree_map(lambda v: _real(v, name), kwargs))


def _real(value: Any, name: str = "arithmetic") -> Any:
    return value.value(f"{name} of the logits") if isinstance(value, DeferredLogits) else value


def _is_factor(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _spares_the_last(index: Any, ndim: int) -> bool:
    """Whether an index leaves the last of `ndim` dimensions whole."""
    items = index if isinstance(index, tuple) else (index,)
    used = 0
    for item in items:
        if isinstance(item, torch.Tensor):
            used += item.dim() if item.dtype == torch.bool else 1
        elif isinstance(item, int | slice) and not isinstance(item, bool):
            used += 1
        elif item is not None and item is not Ellipsis:
            return False
    if Ellipsis in [i for i in items if not isinstance(i, torch.Tensor)]:
        last = items[-1]
        return last is Ellipsis or (isinstance(last, slice) and last == slice(None))
    return used < ndim or (isinstance(items[-1], slice) and items[-1] == slice(None))


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: cross_entropy,
    opake_cross_entropy_loss: opake_cross_entropy,
    torch.tanh: DeferredLogits.tanh,
    torch.mul: DeferredLogits.__mul__,
    torch.div: DeferredLogits.__truediv__,
    torch.squeeze: DeferredLogits.squeeze,
    torch.reshape: DeferredLogits.reshape,
    torch.flatten: DeferredLogits.flatten,
}


def _arithmetic(name: str) -> Callable[..., Any]:
    def method(self: DeferredLogits, *others: Any) -> Any:
        return getattr(self.value(f"{name} of the logits"), name)(*[_real(other) for other in others])

    return method


_OPERATORS = (
    "add radd sub rsub rtruediv pow rpow matmul rmatmul neg abs eq ne lt le gt ge setitem iadd isub imul itruediv"
)
for _name in _OPERATORS.split():
    setattr(DeferredLogits, f"__{_name}__", _arithmetic(f"__{_name}__"))
DeferredLogits.__hash__ = object.__hash__  # type: ignore[method-assign]
