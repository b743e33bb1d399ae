"""Argument checks shared by all ops, run in the public function before anything is launched.

Every message names the op, the argument and both values. Only shapes, dtypes and devices are looked at, never
contents. Also here: what autocast does to the arguments, since that too belongs to the public function and must stay
differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .launch import autocasting

__all__ = [
    "ExampleAxisError",
    "autocast_to_compute_dtype",
    "autocast_to_widest",
    "check_float",
    "check_index",
    "check_same_device",
    "check_same_dtype",
    "check_shape",
]


class ExampleAxisError(ValueError):
    """A weight has an example axis that the rows do not have: they were flattened before they came here."""


def check_float(op: str, **tensors: Any) -> None:
    """Each is a floating-point tensor, else TypeError."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")
        if not tensor.is_floating_point():
            raise TypeError(f"{op}: {name} must be floating point, got {tensor.dtype}")


def check_index(op: str, **tensors: Any) -> None:
    """Each is an int64 or int32 tensor, else TypeError."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"{op}: {name} must be int64 or int32, got {tensor.dtype}")


def check_same_dtype(op: str, **tensors: torch.Tensor) -> None:
    """All dtypes are equal, else TypeError."""
    (first, reference), *rest = tensors.items()
    for name, tensor in rest:
        if tensor.dtype != reference.dtype:
            raise TypeError(f"{op}: {first} and {name} must have one dtype, got {reference.dtype} and {tensor.dtype}")


def check_same_device(op: str, **tensors: torch.Tensor) -> None:
    """All devices are equal, else ValueError."""
    (first, reference), *rest = tensors.items()
    for name, tensor in rest:
        if tensor.device != reference.device:
            raise ValueError(
                f"{op}: {first} and {name} must be on one device, got {reference.device} and {tensor.device}"
            )


def check_shape(op: str, name: str, shape: Sequence[int], expected: Sequence[int], why: str) -> None:
    """`shape` is `expected`, else ValueError; `why` says where the expectation comes from."""
    if tuple(shape) != tuple(expected):
        raise ValueError(f"{op}: {name} has shape {tuple(shape)}, expected {tuple(expected)} ({why})")


def autocast_to_widest(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Under autocast, mixed dtypes become the widest, as torch promotes element-wise arithmetic; else unchanged."""
    if not autocasting(tensors[0]) or all(t.dtype == tensors[0].dtype for t in tensors):
        return tensors
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(t.to(dtype) for t in tensors)


def autocast_to_compute_dtype(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Under autocast, the autocast dtype, as for a matrix product; else unchanged. float64 stays, as in torch."""
    if not autocasting(tensors[0]):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)
