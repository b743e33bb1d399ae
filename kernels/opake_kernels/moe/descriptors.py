"""Tensor descriptors of stacked matrices, with which a Hopper GPU moves whole tiles without the threads' help.

One is made on the host for each launch; what it describes is a stack seen as one tall matrix. None where the device or
the layout does not allow it: then the kernels load by pointers, with the same bits as a result.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from opake_kernels.launch import INTERPRET

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    TensorDescriptor: Any = None

__all__ = ["descriptor"]


@functools.cache
def _has_unit(device: torch.device) -> bool:
    return TensorDescriptor is not None and not INTERPRET and torch.cuda.get_device_capability(device)[0] == 9


def descriptor(stack: torch.Tensor, box: tuple[int, int]) -> Any:
    """Of (E, rows, columns) as (E * rows, columns), read in boxes of that many rows and columns; or None."""
    if not stack.is_cuda or stack.dtype.itemsize != 2 or not _has_unit(stack.device):
        return None
    E, rows, columns = stack.shape
    if not stack.is_contiguous() or columns % 8 or stack.data_ptr() % 16 or E * rows >= 2**31 or max(box) > 256:
        return None
    return TensorDescriptor.from_tensor(stack.view(-1, columns), list(box))
