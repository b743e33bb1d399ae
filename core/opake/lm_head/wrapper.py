"""`LinearCrossEntropy` in place: the model's own forward, unless a call says `loss_only=True`.

Then the same forward runs with its head deferred (call.py) and returns the loss with `logits=None`; in a tuple they are
left out. Whatever the forward does besides - hidden states, auxiliary losses, every keyword - it does as always. Where
the logits had to be computed after all, they are returned, and the reason is noted on the model.
"""

# ruff: noqa: TID253
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from opake import hf
from opake.patching.instance import wrap_method
from opake.patching.state import state_of
from opake.patching.undo import Skip, Undo

from .call import LossOnly, head_linears, is_plain, linear_forward, running, under_way
from .deferred import DeferredLogits

if TYPE_CHECKING:
    import torch

    from opake.records import LinearCrossEntropy

FLAG = "chunked_linear_cross_entropy"
# what `loss_only` is when the caller takes the deferred logits themselves
DEFERRED = "deferred"


def fits(record: LinearCrossEntropy, model: nn.Module) -> Skip | None:
    if hf.output_embeddings(model) is None:
        return Skip(f"{type(model).__name__} has no output embeddings")
    return None


def apply(record: LinearCrossEntropy, model: nn.Module) -> Undo:
    head = hf.output_embeddings(model)
    assert head is not None, "checked by fits"
    linears = [wrap_method(linear, "forward", linear_forward) for linear in head_linears(head)]
    return Undo([*linears, wrap_method(model, "forward", _forward)])


def axis_parameters(record: LinearCrossEntropy, model: nn.Module) -> frozenset[str]:
    """Weight and bias of a plain head; of one that is tied, the embedding's name says that it cannot."""
    head = hf.output_embeddings(model)
    if head is None or not is_plain(head):
        return frozenset()
    site = next((name for name, module in model.named_modules() if module is head), None)
    return frozenset(f"{site}.{name}" for name, _ in head.named_parameters(recurse=False)) if site else frozenset()


def supports_loss_only(model: nn.Module) -> bool:
    """Whether `model(..., loss_only=True)` is understood: the patch is on, here or inside a wrapper."""
    from opake.patching.target import locate

    state = state_of(locate(model).model)
    return state is not None and any(entry.record.flag == "fused_linear_cross_entropy" for entry in state.applied)


def deferred_logits(model: nn.Module, **batch: Any) -> torch.Tensor | DeferredLogits:
    """The logits (B, T, V) of a call, not computed where the model supports it.

    They may be sliced, reshaped in the leading dimensions, scaled, and handed to `F.cross_entropy` or
    `opake_cross_entropy_loss`, as the batched engine does for the loss of each row; anything else computes them. A mean
    over no label is 0.
    """
    if not supports_loss_only(model):
        return model(**batch).logits
    return model(**batch, loss_only=DEFERRED).logits


def _forward(inner: Callable[..., Any], self: nn.Module, *args: Any, loss_only: Any = False, **kwargs: Any) -> Any:
    if not loss_only:
        if not under_way():
            return inner(self, *args, **kwargs)
        with running(None):
            return inner(self, *args, **kwargs)
    state = state_of(self)
    chunk = state.options.get(FLAG) or None if state is not None else None
    call = LossOnly(self, chunk, by_row=loss_only == DEFERRED)
    with running(call):
        out = inner(self, *args, **kwargs)
    if not call.deferred:
        call.note("no plain linear was called")
    if loss_only == DEFERRED:
        return out
    return _without_logits(out, call)


def _without_logits(out: Any, call: LossOnly) -> Any:
    """`out` without deferred logits, or with the real ones where they were computed or there is no loss."""
    if isinstance(out, Mapping):
        fields = _settled(dict(out), call, out.get("loss") is not None)
        return type(out)(**fields)
    if isinstance(out, tuple):
        return tuple(_settled(dict(enumerate(out)), call, not isinstance(out[0], DeferredLogits)).values())
    return out


def _settled(fields: dict[Any, Any], call: LossOnly, has_loss: bool) -> dict[Any, Any]:
    settled = {}
    for name, value in fields.items():
        if not isinstance(value, DeferredLogits):
            settled[name] = value
        elif value.tensor is not None or not has_loss:
            settled[name] = value.value("the call has no labels and so no loss")
    return settled
