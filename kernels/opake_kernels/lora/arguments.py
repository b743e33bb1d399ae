"""What the LoRA ops ask of their arguments: shapes, dtypes, and whether an adapter brings an example axis of its own.

Only shapes, dtypes and devices are looked at. Messages name the argument and both values. Also here: the compute dtype
under autocast, and when an op leaves the work to its plain twin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from opake_kernels.checks import ExampleAxisError, autocast_to_compute_dtype, check_float
from opake_kernels.launch import autocasting
from opake_kernels.tracked import trained

__all__ = ["Projection", "check_precision", "check_projections", "leading_axis", "takes_twin", "with_axis"]

# (suffix of the argument names, W, A, B, bias)
Projection = tuple[str, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def check_projections(op: str, X: torch.Tensor, projections: Sequence[Projection]) -> torch.Tensor:
    """X in the compute dtype, once everything fits; TypeError and ValueError else.

    A W named `d` is that of a down projection, whose rows are as wide as the output of the first one.
    """
    check_float(op, X=X)
    autocast = autocasting(X)
    for suffix, W, A, B, bias in projections:
        width = projections[0][1].shape[0] if suffix == "d" else X.shape[-1] if X.dim() else None
        if W.dim() != 2 or W.shape[1] != width:
            raise ValueError(
                f"{op}: W{suffix} has shape {tuple(W.shape)}, expected (out, {width}) beside X {tuple(X.shape)}"
            )
        if W.dtype != X.dtype and not autocast:
            raise TypeError(f"{op}: X and W{suffix} must have one dtype, got {X.dtype} and {W.dtype}")
        _check_adapter(op, suffix, X, W, A, B)
        if bias is not None and (bias.dim() not in (1, 2) or bias.shape[-1] != W.shape[0]):
            raise ValueError(f"{op}: b{suffix} has shape {tuple(bias.shape)}, expected ({W.shape[0]},)")
        if bias is not None and bias.dim() == 2:
            _check_axis(op, f"b{suffix}", bias, X)
        for name, tensor in (("W", W), ("A", A), ("B", B), ("b", bias)):
            if tensor is not None and tensor.device != X.device:
                raise ValueError(f"{op}: X is on {X.device} and {name}{suffix} on {tensor.device}")
    return autocast_to_compute_dtype(X)[0]


def _check_adapter(
    op: str, suffix: str, X: torch.Tensor, W: torch.Tensor, A: torch.Tensor | None, B: torch.Tensor | None
) -> None:
    if A is None or B is None:
        if A is not B:
            raise ValueError(f"{op}: A{suffix} and B{suffix} must be given together, or both be None")
        return
    check_float(op, **{f"A{suffix}": A, f"B{suffix}": B})
    a, b = tuple(A.shape), tuple(B.shape)
    if A.dim() not in (2, 3) or a[-2] != W.shape[1]:
        raise ValueError(f"{op}: A{suffix} has shape {a}, expected (hidden, rank) with hidden {W.shape[1]}")
    if B.dim() not in (2, 3) or b[-2:] != (a[-1], W.shape[0]):
        raise ValueError(f"{op}: B{suffix} has shape {b}, expected (rank, out) = {(a[-1], W.shape[0])}")
    if not a[-1]:
        raise ValueError(f"{op}: A{suffix} has shape {a}, a rank of 0; give None for A and B without an adapter")
    for name, tensor in (("A", A), ("B", B)):
        if tensor.dim() == 3:
            _check_axis(op, f"{name}{suffix}", tensor, X)


def _check_axis(op: str, name: str, tensor: torch.Tensor, X: torch.Tensor) -> None:
    if X.dim() < 2 or tensor.shape[0] not in (1, X.shape[0]):
        raise ExampleAxisError(
            f"{op}: {name} has shape {tuple(tensor.shape)}, so its first dimension is an example axis, "
            f"but the input has shape {tuple(X.shape)}"
        )


def leading_axis(projections: Sequence[Projection]) -> int:
    """1 if an adapter or a bias has an example axis, which then is the first dimension of the rows; else 0."""
    for _, _, A, B, bias in projections:
        if (A is not None and A.dim() == 3) or (B is not None and B.dim() == 3):
            return 1
        if bias is not None and bias.dim() == 2:
            return 1
    return 0


def with_axis(groups: int, projection: Projection) -> tuple[torch.Tensor | None, ...]:
    """W, A, B, bias with a group dimension of one where the call has an example axis and they do not."""
    _, W, A, B, bias = projection
    if not groups:
        return W, A, B, bias
    return (
        W.unsqueeze(0),
        A if A is None or A.dim() == 3 else A.unsqueeze(0),
        B if B is None or B.dim() == 3 else B.unsqueeze(0),
        bias if bias is None or bias.dim() == 2 else bias.unsqueeze(0),
    )


def check_precision(op: str, lora_precision: str) -> None:
    """`compute` or `param`, else ValueError."""
    if lora_precision not in ("compute", "param"):
        raise ValueError(f"{op}: lora_precision is {lora_precision!r}, expected 'compute' or 'param'")


def takes_twin(projections: Sequence[Projection], lora_precision: str) -> bool:
    """Whether plain torch serves the call: adapters in their own precision, a trainable base weight, or compilation.

    A dense gradient of a base weight is no business of LoRA, but it must not be lost.
    """
    compiling: Any = torch.compiler.is_compiling()
    return compiling or lora_precision == "param" or not frozen(projections)


def frozen(projections: Sequence[Projection]) -> bool:
    """Whether nobody can ask for the gradient of a base weight, in whatever transform the call is."""
    return not any(trained(W) for _, W, _, _, _ in projections)
