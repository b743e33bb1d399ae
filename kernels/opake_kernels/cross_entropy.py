"""Cross-entropy over a vocabulary of any size: one pass over the logits forward, one backward, the logits left intact.

Forward keeps the logsumexp of each row, in two parts that lose nothing to a common offset; backward recomputes the
softmax from it and writes a new gradient. Reduction happens on the device and per group, so under vmap every example
has its own denominator. Leaves out the head's matrix product (linear_cross_entropy) and the shift of labels (the
model's loss function).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function_variadic

from .checks import check_float, check_index, check_same_device, check_shape
from .cross_entropy_kernels import cross_entropy_bwd_kernel, cross_entropy_fwd_kernel, cross_entropy_reduce_kernel
from .fold import ROWS, fold_groups, function_pair
from .labels import look_at_labels
from .launch import cdiv, launch, uses_triton
from .row_softmax import grad_tile, row_tile
from .strided_rows import dense_like, row_strides

__all__ = ["CrossEntropySettings", "cross_entropy_reference", "opake_cross_entropy_loss"]

_REDUCTIONS = ("none", "sum", "mean")


@dataclass(frozen=True, slots=True)
class CrossEntropySettings:
    """What a cross-entropy is asked to do; softcap 0 means none. Logits are scaled first, then capped."""

    ignore_index: int = -100
    smoothing: float = 0.0
    softcap: float = 0.0
    scale: float = 1.0
    reduction: str = "mean"

    @classmethod
    def checked(cls, op: str, ignore_index: int, smoothing: float, softcap: float | None, scale: float, reduction: str):
        """The settings, or ValueError naming the argument, its value and what is allowed."""
        if reduction not in _REDUCTIONS:
            raise ValueError(f"{op}: reduction is {reduction!r}, expected one of {', '.join(_REDUCTIONS)}")
        if not 0.0 <= smoothing <= 1.0:
            raise ValueError(f"{op}: label_smoothing is {smoothing}, expected a value in [0, 1]")
        if softcap is not None and softcap < 0.0:
            raise ValueError(f"{op}: logit_softcapping is {softcap}, expected a positive value, or 0 or None for none")
        return cls(int(ignore_index), float(smoothing), float(softcap or 0.0), float(scale), reduction)


def cross_entropy_reference(
    logits: torch.Tensor, labels: torch.Tensor, settings: CrossEntropySettings | None = None
) -> torch.Tensor:
    """The plain twin of `opake_cross_entropy_loss`."""
    settings = settings or CrossEntropySettings()
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * settings.scale
    if settings.softcap:
        z = settings.softcap * torch.tanh(z / settings.softcap)
    ignored = labels == settings.ignore_index
    valid = (labels >= 0) & (labels < logits.shape[-1])
    # not logsumexp(z) - z, which loses digits to a common offset of the logits
    z = torch.log_softmax(z, -1)
    loss = -z.gather(-1, torch.where(valid, labels, 0).long().unsqueeze(-1)).squeeze(-1)
    if settings.smoothing:
        loss = (1.0 - settings.smoothing) * loss - settings.smoothing * z.mean(-1)
    # a label out of range makes loss and gradient of its token NaN
    loss = torch.where(ignored, 0.0, loss * torch.where(valid | ignored, 1.0, torch.nan).to(loss.dtype))
    if settings.reduction == "none":
        return loss
    total = loss.sum()
    return total if settings.reduction == "sum" else total / (~ignored).sum().clamp(min=1)


def _tokens(logits: torch.Tensor, labels: torch.Tensor, settings: CrossEntropySettings) -> Any:
    """Losses shaped like `labels`, and the two parts of their logsumexp in a last dimension of two; fp32."""
    loss = dense_like(labels, torch.float32)
    lse = torch.empty((*labels.shape, 2), dtype=torch.float32, device=logits.device)
    x, inner, outer, step = row_strides(logits)
    launch(
        cross_entropy_fwd_kernel, (labels.numel(),), x, x, labels, loss, lse, x.shape[-1], inner, outer, step,
        settings.ignore_index, settings.scale, settings.softcap, settings.smoothing,
        CAP=bool(settings.softcap), SMOOTH=bool(settings.smoothing), **row_tile(x),
    )  # fmt: skip
    return loss, lse


def _forward_tokens(logits: torch.Tensor, labels: torch.Tensor, groups: int, settings: CrossEntropySettings) -> Any:
    return _tokens(logits, labels.contiguous(), settings)


def _forward_reduced(logits: torch.Tensor, labels: torch.Tensor, groups: int, settings: CrossEntropySettings) -> Any:
    labels = labels.contiguous()
    losses, lse = _tokens(logits, labels, settings)
    loss = losses.new_empty(logits.shape[:groups])
    weight = torch.empty_like(loss)
    if not labels.numel():
        loss.zero_()
    else:
        G = fold_groups(labels, groups)
        launch(
            cross_entropy_reduce_kernel, (G,), losses, losses, labels, loss, weight, labels.numel() // G,
            settings.ignore_index, MEAN=settings.reduction == "mean", BLOCK=2048, num_warps=8,
        )  # fmt: skip
    return loss, lse, weight


def _backward(grads: Any, saved: Any, need: Any, groups: int, settings: CrossEntropySettings) -> Any:
    (g,), (logits, labels, lse, *weight) = grads, saved
    V = logits.shape[-1]
    d = dense_like(logits)
    x, inner, outer, step = row_strides(logits)
    tile = grad_tile(d)
    NB = cdiv(V + tile["W"] - 1, tile["BLOCK"] * tile["TILES"])
    R = labels.numel() // max(fold_groups(labels, groups), 1)
    launch(
        cross_entropy_bwd_kernel, (labels.numel() * NB,), x, x, labels.contiguous(), lse.contiguous(), g.contiguous(),
        weight[0].contiguous() if weight else lse, d, V, NB, max(R, 1), inner, outer, step,
        settings.ignore_index, settings.scale, settings.softcap, settings.smoothing,
        CAP=bool(settings.softcap), SMOOTH=bool(settings.smoothing), REDUCED=bool(weight), DENSE=x.is_contiguous(),
        **tile,
    )  # fmt: skip
    return [d, None]


def _outline_tokens(labels: torch.Tensor) -> list[Any]:
    return [(labels.shape, torch.float32), ((*labels.shape, 2), torch.float32)]


def _outline_reduced(logits: torch.Tensor, labels: torch.Tensor, groups: int, settings: CrossEntropySettings) -> Any:
    lead = logits.shape[:groups]
    return [(lead, torch.float32), _outline_tokens(labels)[1], (lead, torch.float32)]


_token_losses = function_pair(
    "opake_cross_entropy_tokens",
    forward=_forward_tokens,
    backward=_backward,
    roles=(ROWS, ROWS),
    save_inputs=(0, 1),
    save_outputs=(1,),
    stats=1,
    outline=lambda logits, labels, groups, settings: _outline_tokens(labels),
)
_reduced_loss = function_pair(
    "opake_cross_entropy_loss",
    forward=_forward_reduced,
    backward=_backward,
    roles=(ROWS, ROWS),
    save_inputs=(0, 1),
    save_outputs=(1, 2),
    stats=2,
    outline=_outline_reduced,
)


def opake_cross_entropy_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_softcapping: float | None = 0.0,
    logit_scale: float = 1.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """Cross-entropy of softmax(softcap(logit_scale * logits)) against class indices, computed in fp32.

    logits: (..., V) floating, V >= 1, left intact. labels: (...) int64 or int32. Returns fp32 (float64 for float64
    logits): reduction "none" has the shape of `labels`, 0 where ignored; "sum"; "mean" is over labels that are not
    ignored and 0 when all are. `label_smoothing` mixes in the uniform distribution (Szegedy et al., 2015);
    `logit_softcapping` c gives c * tanh(x / c), 0 or None for none. A label out of range is a ValueError where looking
    costs no device read (CPU outside transforms, or anywhere under OPAKE_DEBUG=1), else the loss of its token is NaN.
    Raises TypeError (dtype), ValueError (shape, device, settings).
    """
    if has_torch_function_variadic(logits, labels):
        options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
        options |= {"logit_softcapping": logit_softcapping, "logit_scale": logit_scale}
        return handle_torch_function(opake_cross_entropy_loss, (logits, labels), logits, labels, **options)
    op = "opake_cross_entropy_loss"
    settings = CrossEntropySettings.checked(
        op, ignore_index, label_smoothing, logit_softcapping, logit_scale, reduction
    )
    check_float(op, logits=logits)
    check_index(op, labels=labels)
    check_same_device(op, logits=logits, labels=labels)
    if not logits.dim() or not logits.shape[-1]:
        raise ValueError(f"{op}: logits have shape {tuple(logits.shape)}, expected (..., V) with V >= 1")
    check_shape(op, "labels", labels.shape, logits.shape[:-1], "the leading dimensions of logits")
    look_at_labels(op, labels, logits.shape[-1], settings.ignore_index)
    if not uses_triton(logits, labels):
        return cross_entropy_reference(logits, labels, settings)
    pair = _token_losses if reduction == "none" else _reduced_loss
    return pair(logits, labels, 0, settings)[0]
