"""Adapters in the compute dtype, cast once for all calls of a step, or at least all of a call at once.

The casts of a LoRA model are hundreds of small launches a step. Here they are one multi-tensor copy into one buffer, in
the order given, so that factors that belong side by side lie side by side. A call finds the copy by the address of its
factor and its stream; all that it does not find, it casts together. The factors must not change inside the block. A
plain table and no context variable: the backward of a GPU runs in a thread of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

__all__ = ["beside", "cast_ahead", "ready"]

_Key = tuple[int, torch.dtype, int]
_copies: dict[_Key, _Copy] = {}


class _Copy:
    """A copy made ahead, and how a call saw it last: forward and backward ask for the same view."""

    def __init__(self, made: torch.Tensor) -> None:
        self.made, self._view = made, made

    def like(self, w: torch.Tensor) -> torch.Tensor | None:
        """The copy with the shape and strides of `w`; None if `w` is not the whole of what was copied."""
        view, shape, stride = self._view, w.shape, w.stride()
        if view.shape == shape and view.stride() == stride:
            return view
        if self.made.numel() != w.numel() or not (w.is_contiguous() or w.mT.is_contiguous()):
            return None
        # the same numbers in the same order, seen through the strides of the call
        self._view = self.made.as_strided(shape, stride, self.made.storage_offset())
        return self._view


@contextlib.contextmanager
def cast_ahead(factors: Sequence[torch.Tensor], dtype: torch.dtype) -> Iterator[None]:
    """For the time of the block, copies of these contiguous matrices in `dtype` are ready for the LoRA ops."""
    given = [f for f in factors if f.dtype != dtype and f.is_contiguous() and f.numel()]
    copies = _copied(given, dtype) if given else []
    made = {_key(f, dtype): _Copy(copy) for f, copy in zip(given, copies, strict=True)}
    _copies.update(made)
    try:
        yield
    finally:
        for key, copy in made.items():
            # another thread may have put its own in this place
            if _copies.get(key) is copy:
                del _copies[key]


@torch.no_grad()
def _copied(factors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Contiguous copies of all factors, one after the other in one buffer."""
    sizes = [f.numel() for f in factors]
    buffer = torch.empty(sum(sizes), dtype=dtype, device=factors[0].device)
    pieces = [p.view(f.shape) for p, f in zip(buffer.split(sizes), factors, strict=True)]
    torch._foreach_copy_(pieces, factors)  # pyright: ignore[reportPrivateImportUsage]
    return pieces


def _key(w: torch.Tensor, dtype: torch.dtype) -> _Key:
    return w.data_ptr(), dtype, _stream(w.get_device()) if w.is_cuda else 0


def _public_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


# the public way makes a Stream object each time, which takes longer than everything else here
_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _public_stream)


def ready(factors: Sequence[torch.Tensor], dtype: torch.dtype, turned: int = 0) -> list[torch.Tensor]:
    """Each factor in `dtype`: itself, the copy made ahead, or one made here, together with all others that are missing.

    What is made here lies one after the other: the first `turned` as (r, in), so that they are side by side, the others
    with the strides that they have.
    """
    found = [w if w.dtype == dtype else _copy_of(w, dtype) for w in factors]
    missing = [i for i, made in enumerate(found) if made is None]
    if len(missing) > 1:
        laid = [factors[i].mT if i < turned or not factors[i].is_contiguous() else factors[i] for i in missing]
        for i, given, made in zip(missing, laid, _copied(laid, dtype), strict=True):
            found[i] = made if given is factors[i] else made.mT
    return [w.to(dtype) if made is None else made for w, made in zip(factors, found, strict=True)]


def _copy_of(w: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    copy = _copies.get(_key(w, dtype)) if _copies else None
    return None if copy is None else copy.like(w)


def beside(A: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Factors (H, r_j) as one (H, sum of ranks), a view, if they lie one after the other as `ready` makes them."""
    first, storage = A[0], A[0].untyped_storage()._cdata
    if first.dim() != 2:
        return None
    H, end = first.shape[0], first.storage_offset()
    for a in A:
        if a.stride() != (1, H) or a.storage_offset() != end or a.untyped_storage()._cdata != storage:
            return None
        end += a.numel()
    return first.as_strided((H, (end - first.storage_offset()) // H), (1, H))
