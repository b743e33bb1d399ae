"""Where Triton is met: is it usable for these tensors, on which device, with how many warps.

Triton may be missing (macOS) or interpreted on a CPU (`TRITON_INTERPRET=1`); op files take `jit` and `tl` from here so
that they import everywhere. Leaves out tuning at run time: block sizes follow from shapes alone, so nothing is timed
on a user's clock.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import triton.language as tl
    from triton import jit

    HAS_TRITON = True
else:
    try:
        import triton.language as tl
        from triton import jit

        HAS_TRITON = True
    except ImportError:
        HAS_TRITON = False

        class _MissingLanguage:
            """Stands for `triton.language` in signatures; no kernel body is ever run without Triton."""

            constexpr = int

        tl = _MissingLanguage()

        def jit(fn=None, **_options):
            return fn if fn is not None else lambda wrapped: wrapped


__all__ = [
    "DEBUG",
    "HAS_TRITON",
    "INTERPRET",
    "alike",
    "cdiv",
    "jit",
    "launch",
    "next_power_of_2",
    "tl",
    "uses_triton",
    "warps_for",
]

# read once, as triton.jit itself does when a kernel is decorated
INTERPRET = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0") == "1"
if INTERPRET:
    from .interpreter import repair

    repair()
# OPAKE_DEBUG=1 allows checks that read values from the device
DEBUG = os.environ.get("OPAKE_DEBUG", "0") == "1"

_KERNEL_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})


def uses_triton(*tensors: torch.Tensor | None) -> bool:
    """True if the Triton kernels can serve these tensors; else the op takes its plain twin.

    Kernels compute in fp32, so float64 stays with the twin. Integer tensors (labels) only need the right device.
    """
    if not HAS_TRITON:
        return False
    for tensor in tensors:
        if tensor is None:
            continue
        if not (tensor.is_cuda or INTERPRET) or tensor.device.type == "meta":
            return False
        if tensor.is_floating_point() and tensor.dtype not in _KERNEL_DTYPES:
            return False
    return True


def autocasting(tensor: torch.Tensor) -> bool:
    """Whether autocast is on for the device of `tensor`; torch has no answer for meta, where nothing is computed."""
    device = tensor.device.type
    return device != "meta" and torch.is_autocast_enabled(device)


def alike(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors have one shape, dtype and device, which the kernels serve as they are."""
    return (
        uses_triton(x)
        and x.dtype in _KERNEL_DTYPES
        and x.dtype == y.dtype
        and x.shape == y.shape
        and x.device == y.device
        and not autocasting(x)
    )


def launch(kernel: Any, grid: tuple[int, ...], on: torch.Tensor, *args: Any, **meta: Any) -> None:
    """Run `kernel[grid](*args, **meta)` on the device of `on`, current or not; an empty grid runs nothing."""
    if 0 in grid:
        return
    if on.is_cuda and on.device.index != torch.cuda.current_device():
        with torch.cuda.device(on.device):
            kernel[grid](*args, **meta)
    else:
        kernel[grid](*args, **meta)


def cdiv(n: int, d: int) -> int:
    """Ceiling of n / d."""
    return -(-n // d)


def next_power_of_2(n: int) -> int:
    """Smallest power of two >= n (1 for n <= 1)."""
    return 1 << max(n - 1, 0).bit_length()


def warps_for(block: int) -> int:
    """Warps for a block of this many elements: 16 elements a thread, between 1 and 16 warps."""
    return min(max(block // 512, 1), 16)
