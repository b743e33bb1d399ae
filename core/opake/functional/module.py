"""A module as a pure function of its parameters, which are a dictionary by name."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, overload

import torch

from opake.errors import InputError
from opake.swap import Places

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
        with in_place(module, params):
            return module(*args, **kwargs)

    named = dict(module.named_parameters())
    params = {name: p.detach() for name, p in named.items()}
    if not partition_trainable:
        return fmodel, params
    trainable = {name: p for name, p in params.items() if named[name].requires_grad}
    return fmodel, trainable, {name: p for name, p in params.items() if name not in trainable}


@contextlib.contextmanager
def in_place(
    module: torch.nn.Module, params: Mapping[str, torch.Tensor], places: Places | None = None, *, wide: bool = False
) -> Iterator[None]:
    """For the time of the block, `params` stand in the module, and what they leave out is detached.

    places: those of the module where the caller knows them already.
    wide: the tensors carry a leading axis that the module's own parameters do not have.
    """
    places = places or Places(module)
    given = check_given(module, places, params, wide=wide)
    rest = (p.detach() if p.requires_grad else p for p in places.tensors)
    with places.holding([given.get(i, own) for i, own in enumerate(rest)]):
        yield


def check_given(
    module: torch.nn.Module, places: Places, params: Mapping[str, torch.Tensor], *, wide: bool = False
) -> dict[int, torch.Tensor]:
    """{index of the module's own tensor: the one for it}, after every name and shape has been checked."""
    kind = type(module).__name__
    given: dict[int, torch.Tensor] = {}
    for name, tensor in params.items():
        if name not in places.names:
            near = difflib.get_close_matches(name, places.names, n=1, cutoff=0)
            hint = f"the nearest is {near[0]!r}" if near else "it has none"
            raise InputError(f"{kind} has no parameter {name!r}; {hint}")
        index = places.names[name]
        own, shape = places.tensors[index].shape, tensor.shape[1:] if wide else tensor.shape
        if shape != own:
            raise InputError(f"parameter {name!r} of {kind} has shape {tuple(own)}, params has {tuple(shape)}")
        if given.setdefault(index, tensor) is not tensor:
            first = next(other for other in params if places.names[other] == index)
            raise InputError(f"{first!r} and {name!r} of {kind} are one tied tensor, but params has two for it")
    return given
