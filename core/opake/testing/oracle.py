"""What per-example gradients must equal: a loop of ordinary one-row backward passes on an unpatched model.

The oracle knows nothing of functorch or of patches. Errors are relative to the largest entry of each parameter's
gradient; a parameter whose gradient is rounding noise is measured against the model's largest gradient instead.
"""

# ruff: noqa: TID253
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from opake.masks.recurrent import ignores_mask_of_one_row

# a gradient smaller than this share of the model's largest one is noise, such as that of a key bias
_NOISE_FLOOR = 1e-4
# and one below this share is zero but for rounding: it is wrong only if it is not small beside the others
_ZERO = 1e-6


def loop_gradients(
    loss: Callable[..., torch.Tensor], params: Mapping[str, torch.Tensor], *rows: torch.Tensor, **named: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Gradients `{name: (B, *shape)}` of `loss(params, *row, **row) -> scalar`, one row and one backward at a time."""
    count = len([*rows, *named.values()][0])
    leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    grads = []
    for i in range(count):
        value = loss(leaves, *(row[i] for row in rows), **{name: row[i] for name, row in named.items()})
        grads.append(torch.autograd.grad(value, list(leaves.values()), allow_unused=True))
    return _stacked(leaves, grads)


def model_loop_gradients(model: torch.nn.Module, **rows: torch.Tensor | Any) -> dict[str, torch.Tensor]:
    """Gradients `{name: (B, *shape)}` of the trainable parameters of `model`, called with batches of one row.

    The model's output is a mapping, or an object, with `loss`. Values of `rows` that are no tensors go to every call.
    """
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    count = next(len(row) for row in rows.values() if isinstance(row, torch.Tensor))
    # some older recurrent layers ignore the mask of a batch of one row: two equal ones have the same mean loss
    times = 2 if "attention_mask" in rows and ignores_mask_of_one_row(model) else 1
    grads = []
    for i in range(count):
        one = {
            name: row[i : i + 1].repeat_interleave(times, 0) if isinstance(row, torch.Tensor) else row
            for name, row in rows.items()
        }
        out = model(**one)
        loss = out["loss"] if isinstance(out, Mapping) else out.loss
        grads.append(torch.autograd.grad(loss, list(params.values()), allow_unused=True))
    return _stacked(params, grads)


def batch_gradients(model: torch.nn.Module, **rows: torch.Tensor | Any) -> dict[str, torch.Tensor]:
    """Gradients of an ordinary backward pass over the whole batch; 0 for what it does not use, a vision tower say."""
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    loss = model(**rows).loss
    return dict(zip(params, torch.autograd.grad(loss, list(params.values()), materialize_grads=True), strict=True))


def _stacked(params: Mapping[str, torch.Tensor], grads: list[tuple]) -> dict[str, torch.Tensor]:
    return {
        name: torch.stack([torch.zeros_like(p) if row[j] is None else row[j] for row in grads]).detach()
        for j, (name, p) in enumerate(params.items())
    }


def relative_error(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> float:
    """Largest `max |got - want| / max |want|` over parameters; infinite if anything is missing or not finite."""
    if got.keys() != want.keys():
        return math.inf
    return max(relative_errors(got, want).values())


def relative_errors(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """`max |got - want| / max |want|` of each parameter; infinite where a shape differs or something is not finite."""
    if any(got[name].shape != want[name].shape for name in want):
        return dict.fromkeys(want, math.inf)
    got, want = ({name: t.detach().double() for name, t in side.items()} for side in (got, want))
    largest = max(float(w.abs().max()) for w in want.values())
    if not math.isfinite(largest) or largest == 0:
        return dict.fromkeys(want, math.inf)
    errors = {
        name: float((got[name] - w).abs().max()) / _scale(float(w.abs().max()), largest) for name, w in want.items()
    }
    return {name: math.inf if math.isnan(error) else error for name, error in errors.items()}


def _scale(own: float, largest: float) -> float:
    return largest if own < _ZERO * largest else max(own, _NOISE_FLOOR * largest)
