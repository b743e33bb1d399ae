"""`dynamic` and `longrope` rotary tables inside transforms: per row and by arithmetic, where stock branches on values.

Stock looks at the largest position and changes the module's buffers: a branch on data, a write into shared state, and
tables that depend on what ran before. Inside a transform the same forward runs on a view of the module whose
frequencies are computed from the row's own positions, so that a row gets what a fresh model would give it alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from opake import hf
from opake.patching.instance import wrap_method
from opake.patching.undo import Skip, Undo
from opake.transforms import inside_transform


def updates(module: nn.Module) -> bool:
    """Whether the rotary tables of `module` depend on the sequence length."""
    return any(_depends(kind) for kind in _kinds(module).values())


def fits(record: object, module: nn.Module) -> Skip | None:
    return (
        None if updates(module) else Skip(f"{type(module).__name__} has no table that depends on the length", "stock")
    )


def apply(record: object, module: nn.Module) -> Undo:
    return Undo([wrap_method(module, "forward", _forward)])


def _kinds(module: nn.Module) -> dict[str | None, str]:
    kind = getattr(module, "rope_type", None)
    if isinstance(kind, dict):
        return kind
    return {None: kind} if isinstance(kind, str) else {}


def _depends(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _forward(
    inner: Callable[..., Any], self: nn.Module, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    if not inside_transform():
        return inner(self, x, position_ids, *args, **kwargs)
    layer_type = kwargs.get("layer_type", args[0] if args else None)
    if not _depends(_kinds(self).get(layer_type, "default")):
        return inner(self, x, position_ids, *args, **kwargs)
    return inner(_view(self, x.device, position_ids, layer_type), x, position_ids, *args, **kwargs)


def _view(module: Any, device: torch.device, position_ids: torch.Tensor, layer_type: str | None) -> nn.Module:
    """The module with its frequencies for these positions and a type that is not updated; the module is not touched."""
    view = object.__new__(type(module))
    vars(view).update(vars(module))
    prefix = "" if layer_type is None else f"{layer_type}_"
    table = _frequencies(module, device, position_ids, layer_type, prefix)
    vars(view)["_buffers"] = {**module._buffers, f"{prefix}inv_freq": table}
    kinds = {**_kinds(module), layer_type: "default"}
    vars(view)["rope_type"] = "default" if layer_type is None else kinds
    return view


def _frequencies(
    module: Any, device: torch.device, position_ids: torch.Tensor, layer_type: str | None, prefix: str
) -> torch.Tensor:
    """(D/2,) frequencies of one row, from its largest position."""
    kind = _kinds(module)[layer_type]
    original = getattr(module, f"{prefix}original_inv_freq").to(device)
    extra = {} if layer_type is None else {"layer_type": layer_type}
    length = position_ids.max() + 1
    if kind == "longrope":
        parameters = module.config.rope_parameters if layer_type is None else module.config.rope_parameters[layer_type]
        limit = parameters["original_max_position_embeddings"]
        stretched, _ = hf.rope_tables()[kind](module.config, device, seq_len=limit + 1, **extra)
    else:
        limit = module.original_max_seq_len
        stretched, _ = hf.rope_tables()[kind](module.config, device, seq_len=length, **extra)
    return torch.where(length > limit, stretched.to(device), original)
