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

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from opake_kernels.cross_entropy import opake_cross_entropy_loss

from .head import PLAIN, Head, Scaling
from .index import spares_the_first, spares_the_last
from .losses import cross_entropy, opake_cross_entropy
from .served import attempt, or_computed


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

    @or_computed("the logits are cast")
    def float(self) -> Any:
        return self.to(torch.float32)

    @or_computed("the logits are cast or moved")
    def to(self, *args: Any, **kwargs: Any) -> Any:
        dtype = kwargs.get("dtype", args[0] if args else None)
        lone = len(args) + len(kwargs) == 1
        if lone and dtype in (torch.float32, self.dtype):
            return self._then(lambda t: t.to(dtype), dtype=dtype)
        if lone and (args or [kwargs.get("device")])[0] in (self.device, str(self.device)):
            return self
        return NotImplemented

    @or_computed("the logits are laid out anew")
    def contiguous(self) -> Any:
        return self._then(lambda t: t.contiguous())

    @or_computed("the logits are squeezed")
    def squeeze(self, dim: Any) -> Any:
        if not self._leads(dim):
            return NotImplemented
        at = dim % self.ndim
        return self._then(lambda t: t.squeeze(at), hidden=self.hidden.squeeze(at))

    @or_computed("the vocabulary dimension is reshaped")
    def view(self, *shape: Any) -> Any:
        return self._shaped(shape)

    @or_computed("the vocabulary dimension is reshaped")
    def reshape(self, *shape: Any) -> Any:
        return self._shaped(shape)

    @or_computed("the vocabulary dimension is flattened")
    def flatten(self, start_dim: Any = 0, end_dim: Any = -1) -> Any:
        if not (self._leads(start_dim) and self._leads(end_dim)):
            return NotImplemented
        end = end_dim % self.ndim
        return self._then(lambda t: t.flatten(start_dim, end), hidden=self.hidden.flatten(start_dim, end))

    @or_computed("single logits or examples are looked at")
    def __getitem__(self, index: Any) -> Any:
        if not spares_the_last(index, self.ndim) or not self._keeps_examples(index):
            return NotImplemented
        return self._then(lambda t: t[index], hidden=self.hidden[index])

    @or_computed("the logits are capped twice")
    def tanh(self) -> Any:
        if self.scaling.capped:
            return NotImplemented
        return self._then(lambda t: t.tanh(), scaling=Scaling(self.scaling.before, True, 1.0))

    @or_computed("the logits are scaled by a tensor")
    def mul(self, other: Any) -> Any:
        if not _is_factor(other):
            return NotImplemented
        return self._then(lambda t: t * other, scaling=self.scaling.times(float(other)))

    @or_computed("the logits are scaled by a tensor")
    def div(self, other: Any) -> Any:
        if not _is_factor(other):
            return NotImplemented
        return self._then(lambda t: t / other, scaling=self.scaling.times(1.0 / float(other)))

    @or_computed("the logits are scaled by a tensor")
    def __mul__(self, other: Any) -> Any:
        return self.mul(other) if _is_factor(other) else NotImplemented

    @or_computed("the logits are scaled by a tensor")
    def __truediv__(self, other: Any) -> Any:
        return self.div(other) if _is_factor(other) else NotImplemented

    __rmul__ = __mul__

    def _leads(self, dim: Any) -> bool:
        """Whether this is the number of a dimension other than the last."""
        return isinstance(dim, int) and -self.ndim <= dim < self.ndim and dim % self.ndim != self.ndim - 1

    def _shaped(self, shape: tuple[Any, ...]) -> Any:
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        if len(sizes) < 2 or sizes[-1] != self.shape[-1] or not all(isinstance(size, int) for size in sizes):
            return NotImplemented
        hidden = self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1])
        return self._then(lambda t: t.reshape(*sizes), hidden=hidden)

    def _keeps_examples(self, index: Any) -> bool:
        """Whether the tokens are still those of all examples, in order, where each example has a weight of its own."""
        weight = self.head.weight
        return weight.dim() == 2 or (len(self) == len(weight) and spares_the_first(index, self.ndim))

    # everything else

    def __getattr__(self, name: str) -> Any:
        # called only for what is not defined above; a name with underscores is no public attribute of a tensor
        if name.startswith("_") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.value(f"{name} of the logits is asked for"), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        serve = _FUNCTIONS.get(func) if args and isinstance(args[0], cls) else None
        found = NotImplemented if serve is None else attempt(serve, args, kwargs)
        if found is not NotImplemented:
            return found
        name = getattr(func, "__name__", str(func))
        return func(*tree_map(lambda v: _real(v, name), args), **tree_map(lambda v: _real(v, name), kwargs))


def _real(value: Any, name: str = "arithmetic") -> Any:
    return value.value(f"{name} of the logits") if isinstance(value, DeferredLogits) else value


def _is_factor(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: cross_entropy,
    opake_cross_entropy_loss: opake_cross_entropy,
    torch.tanh: inspect.unwrap(DeferredLogits.tanh),
    torch.mul: inspect.unwrap(DeferredLogits.mul),
    torch.div: inspect.unwrap(DeferredLogits.div),
    torch.squeeze: inspect.unwrap(DeferredLogits.squeeze),
    torch.reshape: inspect.unwrap(DeferredLogits.reshape),
    torch.flatten: inspect.unwrap(DeferredLogits.flatten),
}


def _arithmetic(name: str) -> Callable[..., Any]:
    def method(self: DeferredLogits, *others: Any) -> Any:
        return getattr(self.value(f"{name} of the logits"), name)(*[_real(other) for other in others])

    return method


_OPERATORS = (
    "add radd sub rsub rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul neg pos abs eq ne lt le gt ge "
    "setitem contains reversed iadd isub imul itruediv ifloordiv imod ipow bool int float complex index"
)
for _name in _OPERATORS.split():
    setattr(DeferredLogits, f"__{_name}__", _arithmetic(f"__{_name}__"))
DeferredLogits.__hash__ = object.__hash__  # type: ignore[method-assign]
