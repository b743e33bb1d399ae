"""Labels out of range: where they may be looked at, and what is said of them.

A read from a device stops the host, and inside a transform a tensor stands for many: there a bad label makes the loss
of its token NaN, which the kernels see to. On a CPU outside transforms looking costs nothing, and OPAKE_DEBUG=1 asks
for it everywhere: then the tensor below all transforms is read, with the labels of all examples.
"""

from __future__ import annotations

import torch
import torch._C._functorch as _functorch

from .fold import values_readable
from .launch import DEBUG

__all__ = ["look_at_labels"]

_is_wrapped = getattr(_functorch, "is_functorch_wrapped_tensor", None)
_unwrapped = getattr(_functorch, "get_unwrapped", None)


def look_at_labels(op: str, labels: torch.Tensor, V: int, ignore_index: int | None = None) -> None:
    """ValueError for a label that is neither a class nor ignored, where looking is allowed."""
    if torch.compiler.is_compiling():
        return
    if DEBUG:
        labels = _innermost(labels)
    elif labels.device.type != "cpu" or not values_readable():
        return
    wrong = (labels < 0) | (labels >= V)
    if ignore_index is not None:
        wrong &= labels != ignore_index
    bad = labels[wrong]
    if bad.numel():
        ignored = "" if ignore_index is None else f" and not ignore_index {ignore_index}"
        raise ValueError(f"{op}: label {int(bad[0])} is out of range for a vocabulary of {V}{ignored}")


def _innermost(tensor: torch.Tensor) -> torch.Tensor:
    if _is_wrapped is not None and _unwrapped is not None:
        while _is_wrapped(tensor):
            tensor = _unwrapped(tensor)
    return tensor
