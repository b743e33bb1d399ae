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
from .fold import ROWS, fold_groups, function_pair, values_readable
from .launch import DEBUG, cdiv, jit, launch, tl, uses_triton
from .row_softmax import aligned_start, cap_scale, grad_tile, row_log_softmax_parts, row_tile, softmax_grad
from .strided_rows import row_strides

__all__ = ["CrossEntropySettings", "check_labels", "cross_entropy_reference", "opake_cross_entropy_loss"]

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
    lse = torch.logsumexp(z, -1)
    chosen = z.gather(-1, torch.where(valid, labels, 0).long().unsqueeze(-1)).squeeze(-1)
    if settings.smoothing:
        chosen = (1.0 - settings.smoothing) * chosen + settings.smoothing * z.mean(-1)
    loss = lse - chosen
    # a label out of range makes loss and gradient of its token NaN
    loss = torch.where(ignored, 0.0, loss * torch.where(valid | ignored, 1.0, torch.nan).to(loss.dtype))
    if settings.reduction == "none":
        return loss
    total = loss.sum()
    return total if settings.reduction == "sum" else total / (~ignored).sum().clamp(min=1)


@jit
def _token_kernel(
    L, Y, LOSS, LSE, V, inner, outer, step, ignore, scale, cap, smoothing,
    CAP: tl.constexpr, SMOOTH: tl.constexpr, T: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """One row a program: the loss of one token, and the two parts of its logsumexp."""
    row = tl.program_id(0).to(tl.int64)
    y = tl.load(Y + row)
    if y == ignore:
        tl.store(LOSS + row, 0.0)
        tl.store(LSE + row * 2 + tl.arange(0, 2), tl.zeros((2,), tl.float32))
    else:
        start = (row // inner) * outer + (row % inner) * step
        top, log_sum, total = row_log_softmax_parts(L, start, V, scale, cap, CAP, SMOOTH, T, W)  # pyright: ignore
        valid = (y >= 0) & (y < V)
        z = cap_scale(tl.load(L + start + tl.where(valid, y, 0)), scale, cap, CAP)
        if SMOOTH:
            z = (1.0 - smoothing) * z + smoothing * (total / V)
        loss = (top - z) + log_sum
        tl.store(LOSS + row, tl.where(valid, loss, float("nan")))
        tl.store(LSE + row * 2, top)
        tl.store(LSE + row * 2 + 1, log_sum)


@jit(do_not_specialize=["R"])
def _reduce_kernel(LOSS, Y, OUT, WEIGHT, R, ignore, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """One group a program: the sum or mean of its R losses, and the weight each token had in it."""
    group = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, R, BLOCK):
        token = start + tl.arange(0, BLOCK)
        total += tl.load(LOSS + group * R + token, mask=token < R, other=0.0)
        if MEAN:
            counted = tl.load(Y + group * R + token, mask=token < R, other=ignore) != ignore
            count += counted.to(tl.int32)
    weight = 1.0
    if MEAN:
        weight = 1.0 / tl.maximum(tl.sum(count, 0), 1).to(tl.float32)
    tl.store(WEIGHT + group, weight)
    tl.store(OUT + group, tl.sum(total, 0) * weight)


@jit(do_not_specialize=["R"])
def _backward_kernel(
    L, Y, LSE, G, WEIGHT, D, V, NB, R, inner, outer, step, ignore, scale, cap, smoothing,
    CAP: tl.constexpr, SMOOTH: tl.constexpr, REDUCED: tl.constexpr, DENSE: tl.constexpr,
    TILES: tl.constexpr, BLOCK: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """TILES tiles of one row a program, aligned in the gradient, and in the logits too where those are DENSE."""
    program = tl.program_id(0)
    row = (program // NB).to(tl.int64)
    aligned, shift = aligned_start(row * V, W)  # pyright: ignore
    y = tl.load(Y + row)
    lane = tl.arange(0, BLOCK)
    begin = (program % NB) * (TILES * BLOCK)
    # lanes of the aligned row that are columns: [shift, end)
    end = V + shift
    stop = tl.minimum(begin + TILES * BLOCK, end)
    if y == ignore:
        zero = tl.zeros((BLOCK,), D.dtype.element_ty)
        for at in range(begin, stop, BLOCK):
            # whole tiles need no mask, and without one an odd V is written 16 bytes at a time
            if (at >= shift) & (at + BLOCK <= end):
                tl.store(D + aligned + at + lane, zero)
            else:
                tl.store(D + aligned + at + lane, zero, mask=(lane >= shift - at) & (lane < end - at))
    else:
        top, log_sum = tl.load(LSE + row * 2), tl.load(LSE + row * 2 + 1)
        group = program // NB // R if REDUCED else row
        g = tl.load(G + group) * tl.load(WEIGHT + group) if REDUCED else tl.load(G + group)
        g = tl.where((y >= 0) & (y < V), g, float("nan"))
        label = y + shift
        from_row = (row // inner) * outer + (row % inner) * step - shift
        source = L + aligned if DENSE else L + from_row
        for at in range(begin, stop, BLOCK):
            out = D + aligned + at + lane
            hit = lane == (label - at).to(tl.int32)
            if (at >= shift) & (at + BLOCK <= end):
                x = tl.load(source + at + lane)
                tl.store(out, softmax_grad(x, top, g, hit, scale, cap, smoothing, V, CAP, SMOOTH, log_sum))
            else:
                inside = (lane >= shift - at) & (lane < end - at)
                x = tl.load(source + at + lane, mask=inside, other=0.0)
                tl.store(out, softmax_grad(x, top, g, hit, scale, cap, smoothing, V, CAP, SMOOTH, log_sum), mask=inside)


def check_labels(op: str, labels: torch.Tensor, V: int, ignore_index: int) -> None:
    """ValueError for a label that is neither a class nor ignored. Reads the labels: not for a device under way."""
    bad = labels[((labels < 0) | (labels >= V)) & (labels != ignore_index)]
    if bad.numel():
        raise ValueError(
            f"{op}: label {int(bad[0])} is out of range for a vocabulary of {V} and not ignore_index {ignore_index}"
        )


def _tokens(logits: torch.Tensor, labels: torch.Tensor, settings: CrossEntropySettings) -> Any:
    """Losses shaped like `labels`, and the two parts of their logsumexp in a last dimension of two; fp32."""
    if DEBUG:
        check_labels("opake_cross_entropy_loss", labels, logits.shape[-1], settings.ignore_index)
    loss = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
    lse = torch.empty((*labels.shape, 2), dtype=torch.float32, device=logits.device)
    x, inner, outer, step = row_strides(logits)
    launch(
        _token_kernel, (labels.numel(),), x, x, labels, loss, lse, x.shape[-1], inner, outer, step,
        settings.ignore_index, settings.scale, settings.softcap, settings.smoothing,
        CAP=bool(settings.softcap), SMOOTH=bool(settings.smoothing), **row_tile(x),
    )  # fmt: skip
    return loss, lse


def _forward_tokens(logits: torch.Tensor, labels: torch.Tensor, groups: int, settings: CrossEntropySettings) -> Any:
    return _tokens(logits, labels.contiguous(), settings)


def _forward_reduced(logits: torch.Tensor, labels: torch.Tensor, groups: int, settings: CrossEntropySettings) -> Any:
    labels = labels.contiguous()
    losses, lse = _tokens(logits, labels, settings)
    loss = losses.new_zeros(logits.shape[:groups])
    weight = torch.empty_like(loss)
    if labels.numel():
        G = fold_groups(labels, groups)
        launch(
            _reduce_kernel, (G,), losses, losses, labels, loss, weight, labels.numel() // G, settings.ignore_index,
            MEAN=settings.reduction == "mean", BLOCK=2048, num_warps=8,
        )  # fmt: skip
    return loss, lse, weight


def _backward(grads: Any, saved: Any, need: Any, groups: int, settings: CrossEntropySettings) -> Any:
    (g,), (logits, labels, lse, *weight) = grads, saved
    V = logits.shape[-1]
    d = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    x, inner, outer, step = row_strides(logits)
    tile = grad_tile(d)
    NB = cdiv(V + tile["W"] - 1, tile["BLOCK"] * tile["TILES"])
    R = labels.numel() // max(fold_groups(labels, groups), 1)
    launch(
        _backward_kernel, (labels.numel() * NB,), x, x, labels.contiguous(), lse.contiguous(), g.contiguous(),
        weight[0].contiguous() if weight else lse, d, V, NB, max(R, 1), inner, outer, step,
        settings.ignore_index, settings.scale, settings.softcap, settings.smoothing,
        CAP=bool(settings.softcap), SMOOTH=bool(settings.smoothing), REDUCED=bool(weight), DENSE=x.is_contiguous(),
        **tile,
    )  # fmt: skip
    return [d, None]


_token_losses = function_pair(
    "opake_cross_entropy_tokens",
    forward=_forward_tokens,
    backward=_backward,
    roles=(ROWS, ROWS),
    save_inputs=(0, 1),
    save_outputs=(1,),
    stats=1,
)
_reduced_loss = function_pair(
    "opake_cross_entropy_loss",
    forward=_forward_reduced,
    backward=_backward,
    roles=(ROWS, ROWS),
    save_inputs=(0, 1),
    save_outputs=(1, 2),
    stats=2,
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
    if labels.device.type == "cpu" and values_readable():
        check_labels(op, labels, logits.shape[-1], settings.ignore_index)
    if not uses_triton(logits, labels):
        return cross_entropy_reference(logits, labels, settings)
    pair = _token_losses if reduction == "none" else _reduced_loss
    return pair(logits, labels, 0, settings)[0]
