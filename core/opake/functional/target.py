"""What is differentiated: a loss of one row, made from the user's function or from a model's own loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from opake.errors import InputError, OptionTypeError, PatchError
from opake.functional.module import in_place
from opake.functional.nested import map_tensors, tensors_of
from opake.functional.turns import turn
from opake.functional.watch import Watch, current_report

Params = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Target:
    """`loss(params, args, kwargs) -> (scalar, aux)` of one row; `model` where the loss is a model's own, else None.

    `watch` looks at that model, and a step holds `alone`, because it cannot share a model with another.
    """

    loss: Callable[[Params, tuple, dict[str, Any]], tuple[torch.Tensor, Any]]
    model: torch.nn.Module | None
    name: str
    watch: Watch | None = None
    alone: contextlib.AbstractContextManager = field(default_factory=contextlib.nullcontext)


def resolve(target: Any, has_aux: bool) -> Target:
    """The target of `per_example_grads` or `clipped_grad`.

    Raises OptionTypeError for what is neither a callable nor a module, and PatchError for a Transformers or PEFT model
    that `apply_model_patches` has not seen.
    """
    if isinstance(target, type):
        raise OptionTypeError(f"the target is a function or a model, got the class {target.__name__}; pass an instance")
    if isinstance(target, torch.nn.Module):
        if hasattr(target, "_orig_mod"):
            raise InputError(
                "the target is compiled by torch.compile, which cannot see through vmap; pass the model itself"
            )
        require_patched(target)
        watch = Watch(target)
        return Target(_model_loss(target, watch, has_aux), target, type(target).__name__, watch, turn(target))
    if not callable(target):
        given = f"{type(target).__name__} {target!r:.60}"
        raise OptionTypeError(f"the target is a function loss(params, *row) or a patched model, got {given}")
    return Target(_function_loss(target, has_aux), None, getattr(target, "__qualname__", type(target).__name__))


def require_patched(model: torch.nn.Module) -> None:
    """Refuse a Transformers model, bare or inside PEFT, that is not patched: it cannot take single rows."""
    from opake.patching.state import state_of
    from opake.patching.target import locate

    found = locate(model)
    if found.pretrained and state_of(found.model) is None:
        raise PatchError(
            f"{type(found.model).__name__} is not patched, so it cannot run under vmap; call "
            "opake.patches.apply_model_patches(model) first, or pass a function loss(params, *row)"
        )


def takes_loss_only(model: torch.nn.Module) -> bool:
    """Whether the model's forward was patched to give the loss without logits on `loss_only=True`."""
    report = current_report(model)
    rows = () if report is None else report.rows
    return any(row.flag == "fused_linear_cross_entropy" and row.state in ("applied", "already") for row in rows)


def _function_loss(fn: Callable, has_aux: bool) -> Callable:
    def loss(params: Params, args: tuple, kwargs: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        out = fn(params, *args, **kwargs)
        if not has_aux:
            return _scalar(out), ()
        if not (isinstance(out, tuple) and len(out) == 2):
            raise InputError(f"with has_aux=True the target returns (loss, aux), got {_described(out)}")
        return _scalar(out[0]), out[1]

    return loss


def _model_loss(model: torch.nn.Module, watch: Watch, has_aux: bool) -> Callable:
    def loss(params: Params, args: tuple, kwargs: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        batch = {name: map_tensors(lambda t: t.unsqueeze(0), value) for name, value in kwargs.items()}
        if not has_aux and takes_loss_only(model):
            batch["loss_only"] = True
        with in_place(model, params, watch.places()):
            out = model(**batch)
        return _scalar(_own_loss(model, out, kwargs)).float(), _aux(out) if has_aux else ()

    return loss


def _own_loss(model: torch.nn.Module, out: Any, batch: Mapping[str, Any]) -> Any:
    if isinstance(out, tuple):
        raise InputError(f"{type(model).__name__} returned a plain tuple, which names no loss; leave return_dict out")
    value = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if value is None:
        raise InputError(
            f"{type(model).__name__} returned no loss for the rows {', '.join(batch)}; pass labels, or let its forward "
            "return a mapping with 'loss'"
        )
    return value


def _aux(out: Any) -> dict[str, Any]:
    """The other tensors of a model's output, without their batch dimension of one."""
    items = out.items() if isinstance(out, Mapping) else vars(out).items()

    def squeeze(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.squeeze(0) if tensor.dim() else tensor

    held = {name: value for name, value in items if name != "loss" and tensors_of(value)}
    plain = {name: value for name, value in held.items() if isinstance(value, (torch.Tensor, tuple, list, dict))}
    return {name: map_tensors(squeeze, value) for name, value in plain.items()}


def _scalar(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point():
        return value
    raise InputError(f"the loss of one row is a floating-point scalar tensor, got {_described(value)}")


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    return f"{type(value).__name__} {value!r:.60}"
