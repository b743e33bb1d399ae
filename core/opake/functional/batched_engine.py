"""The fast engine: one ordinary backward over the microbatch, every parameter carrying an explicit example axis.

Each trainable parameter is expanded, without new storage, to (B, *shape). The ops that consume it know that axis, so
the gradient with respect to the expanded parameter is the per-example gradient: no functorch, no hooks, nothing global.
It may only be offered where that is proved; `obstacle` asks for the proof and says in words what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from opake.checkpoint.guard import rematerialised
from opake.functional.chunk import Chunk, Engine
from opake.functional.module import in_place
from opake.functional.rows import Rows
from opake.functional.target import Target

IGNORED = -100
# keywords of a model call that its loss would take
_ABOUT_THE_LOSS = frozenset({"shift_labels", "num_items_in_batch", "label_smoothing", "ignore_index"})
# logits may be deferred, see opake.lm_head
Losses = Callable[[Any, torch.Tensor], torch.Tensor]


def obstacle(
    target: Target, params: Mapping[str, torch.Tensor], rows: Rows, *, randomness: str, has_aux: bool
) -> str | None:
    """Why the batched engine cannot serve this call; None if it provably can."""
    model = target.model
    if model is None:
        return "the target is a function, and only vmap sees into one"
    if has_aux:
        return "has_aux: other outputs of a row come from the vmap engine alone"
    if randomness != "different":
        return f"randomness={randomness!r} is kept by the vmap engine alone"
    if cannot_record(params, rows) or _any_inference(*model.parameters(), *model.buffers()):
        return "torch.inference_mode is on, or a tensor was made in it, and plain autograd records nothing there"
    from opake.patching import state
    from opake.patching.target import locate

    inner = locate(model).model
    independent = getattr(state, "row_independent", _unproved)(inner)
    return independent or _loss_obstacle(inner, rows) or _axis_obstacle(model, inner, params)


def cannot_record(params: Mapping[str, torch.Tensor], rows: Rows) -> bool:
    """Whether autograd is off for good: in `torch.inference_mode`, and for tensors that were made in it."""
    given = [leaf for leaf in rows.leaves if isinstance(leaf, torch.Tensor)]
    return torch.is_inference_mode_enabled() or _any_inference(*params.values(), *given)


def _any_inference(*tensors: torch.Tensor) -> bool:
    return any(map(torch.Tensor.is_inference, tensors))


def _unproved(model: nn.Module) -> str:
    return f"nothing proves that the rows of {type(model).__name__} are independent in one batch"


def _loss_obstacle(inner: nn.Module, rows: Rows) -> str | None:
    named = rows.rebuild(rows.leaves)[1]
    if row_losses_of(inner) is None:
        return f"the loss of {type(inner).__name__} is not known per row"
    if named.get("labels") is None or not _ABOUT_THE_LOSS.isdisjoint(named):
        return f"per-row losses need labels and nothing else about the loss; the rows are {', '.join(named)}"
    if "position_ids" in named and "attention_mask" not in named:
        return "without a mask, Transformers reads position_ids for sequences packed in one row"
    if adds_router_loss(inner):
        return "the router's auxiliary loss is part of the loss"
    return None


def _axis_obstacle(model: nn.Module, inner: nn.Module, params: Mapping[str, torch.Tensor]) -> str | None:
    """Every name of every given parameter must belong to an op that takes it with an example axis."""
    from opake.patching.state import axis_parameters

    aware = set(axis_parameters(inner))
    places = list(inner.named_parameters(remove_duplicate=False))
    blind = {id(p) for name, p in places if name not in aware}
    # what is not in the inner model at all (a prompt encoder of PEFT's, say) is consumed by an op that nobody knows
    seeing = {id(p) for _, p in places} - blind
    own = dict(model.named_parameters(remove_duplicate=False))
    missing = [name for name in params if name in own and id(own[name]) not in seeing]
    if not missing:
        return None
    shown = ", ".join(missing[:2]) + (", ..." if len(missing) > 2 else "")
    return (
        f"{len(missing)} of {len(params)} trainable parameters are consumed by an op without an example axis: {shown}"
    )


def loss_of(inner: nn.Module) -> Any:
    """The loss function object of a model, None if it has none."""
    return getattr(inner, "loss_function", None)


def adds_router_loss(inner: nn.Module) -> bool:
    """Whether a mixture of experts adds its load-balancing loss to the loss, by its config."""
    return bool(getattr(getattr(inner, "config", None), "output_router_logits", False))


def row_losses_of(inner: nn.Module) -> Losses | None:
    """`(logits (B, T, V), labels (B, T)) -> (B,)` equal, row by row, to the model's own loss; None if unknown.

    A loss function says so itself, by an attribute `row_losses`; the core's causal loss is known here.
    """
    from opake.batching.loss import row_loss

    current = loss_of(inner)
    return causal_row_losses if current is row_loss else getattr(current, "row_losses", None)


def causal_row_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token for each row, fp32; 0 where every label of a row is ignored.

    logits (B, T, V), labels (B, T) -> (B,)
    """
    shifted = labels[:, 1:].to(logits.device)
    flat = logits[:, :-1].reshape(-1, logits.shape[-1]).float()
    tokens = nn.functional.cross_entropy(flat, shifted.reshape(-1), ignore_index=IGNORED, reduction="none")
    return tokens.view(shifted.shape).sum(1) / (shifted != IGNORED).sum(1).clamp(min=1)


class UnreachedError(Exception):
    """Parameters to which the backward found no way: unused, or behind an op that cuts the graph."""


def build(target: Target) -> Engine:
    """The engine for a target that has no obstacle."""
    model, watch = target.model, target.watch
    assert model is not None, "only a model has an obstacle-free batched engine"
    assert watch is not None, "a model is always watched"

    def run(params: Mapping[str, torch.Tensor], rows: Rows) -> Chunk:
        from opake.lm_head import deferred_logits
        from opake.patching.target import locate

        losses_of = row_losses_of(locate(model).model)
        assert losses_of is not None, "the loss was known when the engine was chosen"
        wide = {name: p.detach().expand(rows.count, *p.shape).requires_grad_() for name, p in params.items()}
        batch = rows.leading()[1]
        labels = batch.pop("labels")
        # the backward runs inside too, because it recomputes what was checkpointed
        inside = in_place(model, wide, watch.places(), wide=True)
        with torch.enable_grad(), rematerialised(), watch.adapters_ahead(params), inside:
            losses = losses_of(deferred_logits(model, **batch), labels)
            grads = torch.autograd.grad(losses.sum(), list(wide.values()), allow_unused=True)
        made = dict(zip(wide, grads, strict=True))
        if unreached := [name for name, g in made.items() if g is None]:
            raise UnreachedError(unreached)
        return Chunk(made, losses.detach(), ())

    return run
