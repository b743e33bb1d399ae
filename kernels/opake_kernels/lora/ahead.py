"""Adapters in the compute dtype, cast once for all calls of a step instead of once a call and direction.

The casts of a LoRA model are hundreds of small launches a step. Here they are one multi-tensor copy into one buffer, in
the order given, so that factors that belong side by side lie side by side. A call finds the copy by the address of its
factor and its stream; what it does not find, it casts itself. The factors must not change inside the block. A plain
table and no context variable: the backward of a GPU runs in a thread of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

__all__ = ["beside", "cast_ahead", "ready"]

_Key = tuple[int, torch.dtype, int]
_copies: dict[_Key, torch.Tensor] = {}


@contextlib.contextmanager
def cast_ahead(factors: Sequence[torch.Tensor], dtype: torch.dtype) -> Iterator[None]:
    """For the time of the block, copies of these contiguous matrices in `dtype` are ready for the LoRA ops."""
    given = [f for f in factors if f.dtype != dtype and f.is_contiguous() and f.numel()]
    made = _copied(given, dtype) if given else {}
    _copies.update(made)
    try:
        yield
    finally:
        for key, copy in made.items():
            # another thread may have put its own in this place
            if _copies.get(key) is copy:
                del _copies[key]


@torch.no_grad()
def _copied(factors: list[torch.Tensor], dtype: torch.dtype) -> dict[_Key, torch.Tensor]:
    sizes = [f.numel() for f in factors]
    buffer = torch.empty(sum(sizes), dtype=dtype, device=factors[0].device)
    pieces = [p.view(f.shape) for p, f in zip(buffer.split(sizes), factors, strict=True)]
    torch._foreach_copy_(pieces, factors)  # pyright: ignore[reportPrivateImportUsage]
    return {_key(f, dtype): p for f, p in zip(factors, pieces, strict=True)}


def _key(w: torch.Tensor, dtype: torch.dtype) -> _Key:
    return w.data_ptr(), dtype, _stream(w.get_device()) if w.is_cuda else 0


def _public_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


# the public way makes a Stream object each time, which takes longer than everything else here
_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _public_stream)


def ready(w: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`w` in `dtype`: the copy made ahead if there is one."""
    if w.dtype == dtype:
        return w
    made = _copy_of(w, dtype)
    return w.to(dtype) if made is None else made


def _copy_of(w: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    made = _copies.get(_key(w, dtype)) if _copies else None
    # the same numbers in the same order, seen through the strides of the call
    return made.as_strided(w.shape, w.stride(), made.storage_offset()) if made is not None and _whole(made, w) else None


def _whole(made: torch.Tensor, w: torch.Tensor) -> bool:
    return made.numel() == w.numel() and (w.is_contiguous() or w.mT.is_contiguous())


def beside(A: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor | None:
    """The copies made ahead of factors (H, r_j) as one (H, sum of ranks), if they lie one after the other."""
    if not _copies or any(a.dim() != 2 for a in A):
        return None
    made = [_copy_of(a, dtype) for a in A]
    first = made[0] if made else None
    if first is None:
        return None
    H, end = first.shape[0], first.storage_offset()
    for m in made:
        # copies of one step share one storage, so that neighbours are told by their offsets
        if m is None or m.stride() != (1, H) or m.storage_offset() != end or m.device != first.device:
            return None
        end += m.numel()
    return first.as_strided((H, (end - first.storage_offset()) // H), (1, H))
