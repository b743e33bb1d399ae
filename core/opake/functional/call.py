"""What can be wrong with a call, looked at before anything runs and whichever engine serves it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from opake.errors import InputError, OptionTypeError
from opake.functional.module import check_given
from opake.functional.rows import Rows
from opake.functional.target import Params, Target, require_patched
from opake.swap import Places

# dimensions of what the rows of a model usually hold, with the batch in front
_DIMENSIONS = {"input_ids": 2, "inputs_embeds": 3, "attention_mask": 2, "position_ids": 2, "labels": 2}


def check_call(target: Target, params: Params, args: tuple, kwargs: Mapping[str, Any], in_dims: Any) -> Rows:
    """The rows of a call, after everything that can be wrong with it has been looked at."""
    if target.model is not None:
        require_patched(target.model)
    _check_params(params)
    if target.model is not None and args:
        raise OptionTypeError(
            f"the rows of a model are passed by name, got {len(args)} positional; write input_ids=..., labels=..."
        )
    rows = Rows.of(args, kwargs, in_dims)
    if target.model is not None:
        _check_batch(target.model, rows)
        # where there are rows, the run itself looks at names and shapes
        if not rows.count:
            with target.alone:
                check_given(target.model, Places(target.model), params)
    return rows


def _check_params(params: Params) -> None:
    if not isinstance(params, Mapping):
        raise OptionTypeError(f"params is a mapping of names to tensors, got {type(params).__name__}")
    if not params:
        raise InputError("params is empty: there is nothing to differentiate")
    for name, p in params.items():
        if not isinstance(p, torch.Tensor):
            raise OptionTypeError(f"params[{name!r}] is no tensor, got {type(p).__name__}")
        if not p.is_floating_point():
            raise InputError(f"params[{name!r}] has dtype {p.dtype}; only floating-point tensors take a gradient")


def _check_batch(model: torch.nn.Module, rows: Rows) -> None:
    from opake.batching.check import check_rows
    from opake.patching.target import locate

    dims: dict[str, Any] = rows.rebuild(rows.dims)[1]
    named = rows.leading()[1]
    _check_one_batch_dim(named, dims)
    found = locate(model)
    if found.pretrained:
        _check_returns(found.model, named)
        # a patched forward asks the same of single rows, but the batched engine keeps the labels from it
        check_rows(model, named)


def _check_one_batch_dim(named: Mapping[str, Any], dims: Mapping[str, Any]) -> None:
    """Refuse one sequence where a batch is expected, which would be read as rows of one token each, and vice versa."""
    for name, usual in _DIMENSIONS.items():
        value = named.get(name)
        if not isinstance(value, torch.Tensor):
            continue
        if name in ("input_ids", "inputs_embeds") and value.dim() < usual:
            raise InputError(
                f"{name} has shape {tuple(value.shape)}: rows of a model have a batch dimension in front; "
                f"for one sequence pass {name}.unsqueeze(0)"
            )
        if dims[name] is None and value.dim() == usual + 1 and value.shape[1] == 1:
            raise InputError(
                f"{name} has shape {tuple(value.shape[1:])} and is shared by all rows: what they share has no batch "
                f"dimension; pass {name}.squeeze(0)"
            )


def _check_returns(model: Any, named: Mapping[str, Any]) -> None:
    """Refuse a model that is told to return plain tuples, which name no loss."""
    asked = named.get("return_dict")
    if asked is None and not getattr(model.config, "return_dict", True):
        raise InputError(
            f"the config of {type(model).__name__} has return_dict=False, and a plain tuple names no loss; "
            "set model.config.return_dict = True"
        )
    if asked is False:
        raise InputError(
            f"{type(model).__name__} is to return a plain tuple, which names no loss; leave return_dict out"
        )
