"""Three repairs of Triton's CPU interpreter, made only under `TRITON_INTERPRET=1`.

Loop bounds: the interpreter keeps scalars as arrays of one element, which NumPy >= 2.4 no longer turns into an int, and
older ones only with a warning. Rounding: it cuts float32 to bfloat16 where the compiler, and PyTorch, round to nearest
even; errors would look twice as large as they are. Products: it multiplies the bits of bfloat16 as integers. All are
probed by behaviour, so a Triton without the fault is left alone. Leaves compiled kernels untouched.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

__all__ = ["repair"]


def repair() -> None:
    """Apply the repairs that the installed Triton and NumPy need; calling it again changes nothing."""
    from triton.runtime import interpreter

    if not getattr(interpreter, "_opake_repaired", False):
        _repair_loop_bounds(interpreter)
        _repair_rounding(interpreter)
        _repair_products(interpreter)
        interpreter._opake_repaired = True  # pyright: ignore[reportAttributeAccessIssue]


def _repair_loop_bounds(interpreter: Any) -> None:
    try:
        with warnings.catch_warnings():
            # older NumPy only warns, once for every loop of every program
            warnings.simplefilter("error", DeprecationWarning)
            int(np.array([1]))  # pyright: ignore[reportArgumentType]
        return
    except (TypeError, DeprecationWarning):
        patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        # the scope puts the original back after the launch
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch_lang_tensor


def _repair_rounding(interpreter: Any) -> None:
    import triton.language as tl

    convert = interpreter._convert_float
    # 1 + 3/4 of a unit in the last place, which cutting turns into 1
    sample = np.array([1.005859375], dtype=np.float32)
    if convert(sample, tl.float32, tl.bfloat16, None).view(np.uint16)[0] == 0x3F81:
        return

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            return _nearest_even(data)
        return convert(data, source, target, rounding)

    interpreter._convert_float = convert_float


def _repair_products(interpreter: Any) -> None:
    import triton.language as tl

    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    multiply = builder.create_dot
    one = handle(np.full((1, 1), 0x3F80, dtype=np.uint16), tl.bfloat16)
    zero = handle(np.zeros((1, 1), dtype=np.float32), tl.float32)
    if multiply(interpreter.interpreter_builder, one, one, zero, None, 0).data[0, 0] == 1.0:
        return

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, *(_widened(interpreter, x) if x.dtype == tl.bfloat16 else x for x in (a, b)), *rest)

    builder.create_dot = create_dot


def _widened(interpreter: Any, x: Any) -> Any:
    import triton.language as tl

    return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _nearest_even(data: np.ndarray) -> np.ndarray:
    """float32 -> the bits of bfloat16; a NaN stays one."""
    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(data), np.uint16(0x7FC0), rounded).reshape(data.shape)
