"""The sum of clipped per-example gradients, made microbatch by microbatch without ever holding all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from opake.errors import InputError, OptionTypeError
from opake.functional.call import check_call
from opake.functional.engines import Chooser, check_options
from opake.functional.rows import check_microbatch_size
from opake.functional.steps import Steps
from opake.functional.target import resolve


class ClippedGrad(NamedTuple):
    """Result of `clipped_grad`.

    grads: `{name: tensor}`, the sum over rows of clipped gradients, in the parameters' dtypes and shapes.
    norms, losses: (B,), float32, of the rows before clipping; 0 for padding rows.
    clipped: how many rows had a norm above `clip_norm`; nonfinite: how many were dropped for an infinite or NaN entry.
        Both are int64 scalars on the device of the gradients: reading them waits for the device.
    engine, reason: which engine computed it, and why in words.
    """

    grads: dict[str, torch.Tensor]
    norms: torch.Tensor
    losses: torch.Tensor
    clipped: torch.Tensor
    nonfinite: torch.Tensor
    engine: str
    reason: str


def clipped_grad(
    target: Callable | torch.nn.Module,
    *,
    clip_norm: float,
    has_aux: bool = False,
    in_dims: Any = None,
    randomness: str = "different",
    microbatch_size: int | None = None,
    engine: str = "auto",
    capture: str | bool = "auto",
) -> Callable[..., Any]:
    """A function `f(params, *rows, row_weight=None, **rows) -> ClippedGrad`: each row clipped to `clip_norm`, summed.

    The L2 norm of a row is taken over all of `params` together. Arguments are those of `per_example_grads`, and:

    params: `{name: tensor}`, floating point of at least 16 bits: no float8.
    clip_norm: C > 0; `math.inf` does not clip.
    microbatch_size: at most so many rows' gradients, (b, P), are alive at a time, besides one float32 sum.
    capture: whether a microbatch step is replayed from a CUDA graph, from its second time on. "auto" does so on CUDA
        for a model; True for a function too (what it reads besides its arguments is then frozen), and raises
        EngineUnavailable with the reason where it cannot be done. Microbatches are padded to one size. A graph keeps
        the memory of a step.
    row_weight: (B,), 1 for rows and 0 for padding rows, which add nothing and are not counted.
    has_aux: `f` returns `(ClippedGrad, aux)`.

    The contribution of every row has a norm of at most C in real numbers, and a row with an infinite or NaN gradient
    contributes exactly zero. Sums are float32 or wider and are cast toward zero to a narrower parameter dtype (see
    `opake.functional.clipping`). With zero rows: zeros, and no call of the target. Nothing is read on the host.

    The method is that of Abadi et al. 2016, "Deep Learning with Differential Privacy".
    """
    check_options(engine, randomness, capture)
    check_microbatch_size(microbatch_size)
    _check_clip_norm(clip_norm)
    resolved = resolve(target, has_aux)
    choose = Chooser(resolved, engine, randomness, has_aux)
    steps = Steps(resolved, clip_norm, microbatch_size, capture, has_aux)

    def f(
        params: Mapping[str, torch.Tensor], /, *args: Any, row_weight: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        rows = check_call(resolved, params, args, kwargs, in_dims)
        _check_widths(params)
        real = _real_rows(row_weight, rows.count)
        with resolved.alone:
            choice = choose(params, rows)
            done = steps(choice, params, rows, real)
            choice = choose.after(choice)
        reason = f"{choice.reason}; {done.reason}"
        out = ClippedGrad(done.grads, done.norms, done.losses, done.clipped, done.nonfinite, choice.name, reason)
        return (out, done.aux) if has_aux else out

    name = getattr(target, "__name__", type(target).__name__)
    f.__name__ = f.__qualname__ = f"clipped_grad({name})"
    return f


def _check_widths(params: Mapping[str, torch.Tensor]) -> None:
    for name, p in params.items():
        if p.dtype.itemsize < 2:
            raise InputError(
                f"params[{name!r}] has dtype {p.dtype}, in which no gradient is clipped to a norm; pass a copy of at "
                "least 16 bits, such as bfloat16, and cast it in the target where 8 bits are wanted"
            )


def _check_clip_norm(clip_norm: float) -> None:
    if isinstance(clip_norm, bool) or not isinstance(clip_norm, (int, float)):
        raise OptionTypeError(f"clip_norm is a number, got {clip_norm!r} ({type(clip_norm).__name__})")
    if math.isnan(clip_norm) or clip_norm <= 0:
        raise InputError(f"clip_norm is positive, got {clip_norm}")


def _real_rows(row_weight: torch.Tensor | None, count: int) -> torch.Tensor | None:
    if row_weight is None:
        return None
    if not isinstance(row_weight, torch.Tensor):
        raise OptionTypeError(f"row_weight is a tensor of {count} weights, got {type(row_weight).__name__}")
    if row_weight.shape != (count,):
        raise InputError(f"row_weight has shape {tuple(row_weight.shape)}, the rows are {count}; it needs ({count},)")
    if row_weight.dtype == torch.bool:
        return row_weight
    # looking at values on a CUDA device would wait for it
    if not row_weight.is_cuda and not ((row_weight == 0) | (row_weight == 1)).all():
        raise InputError(f"row_weight holds 1 for rows and 0 for padding rows, got {row_weight.tolist()}")
    return row_weight > 0
