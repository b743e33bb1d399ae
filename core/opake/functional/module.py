"""A module as a pure function of its parameters, which are a dictionary by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, Literal, overload

import torch
from torch.func import functional_call

from opake.errors import InputError

Params = dict[str, torch.Tensor]


@overload
def make_functional(
    module: torch.nn.Module, *, partition_trainable: Literal[False] = False
) -> tuple[Callable[..., Any], Params]: ...
@overload
def make_functional(
    module: torch.nn.Module, *, partition_trainable: Literal[True]
) -> tuple[Callable[..., Any], Params, Params]: ...
def make_functional(module: torch.nn.Module, *, partition_trainable: bool = False) -> Any:
    """`(fmodel, params)`, or with `partition_trainable=True` `(fmodel, trainable, frozen)`.

    `fmodel(params, *args, **kwargs)` calls the module with `params` in place of its own; names left out are the
    module's own and frozen: no gradient reaches them. A tied tensor stands under its first name alone and is replaced
    under all. `params` are detached and share the module's storage; trainable means `requires_grad` at this moment.

    `fmodel` raises InputError for a name that the module does not have, or a shape that differs from the module's.
    """

    def fmodel(params: Mapping[str, torch.Tensor], /, *args: Any, **kwargs: Any) -> Any:
        check_params(module, params)
        return functional_call(module, {**frozen_rest(module, params), **params}, args, kwargs)

    named = dict(module.named_parameters())
    params = {name: p.detach() for name, p in named.items()}
    if not partition_trainable:
        return fmodel, params
    trainable = {name: p for name, p in params.items() if named[name].requires_grad}
    return fmodel, trainable, {name: p for name, p in params.items() if name not in trainable}


def check_params(module: torch.nn.Module, params: Mapping[str, torch.Tensor]) -> None:
    """Raise InputError unless every name is a parameter of `module`, in its shape."""
    own = dict(module.named_parameters(remove_duplicate=False))
    for name, tensor in params.items():
        if name not in own:
            near = difflib.get_close_matches(name, own, n=1, cutoff=0)
            hint = f"; the nearest is {near[0]!r}" if near else "; it has none"
            raise InputError(f"{type(module).__name__} has no parameter {name!r}{hint}")
        if tensor.shape != own[name].shape:
            raise InputError(
                f"parameter {name!r} of {type(module).__name__} has shape {tuple(own[name].shape)}, "
                f"params has {tuple(tensor.shape)}"
            )


def frozen_rest(module: torch.nn.Module, params: Mapping[str, torch.Tensor]) -> Params:
    """Detached copies, without new storage, of the parameters left out of `params` that would take a gradient."""
    given = {id(p) for name, p in module.named_parameters(remove_duplicate=False) if name in params}
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad and id(p) not in given}
