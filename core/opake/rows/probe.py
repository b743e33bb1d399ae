"""A small stand-in of a module: the same class and settings, parameters of the prober's choice, nothing shared."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from opake.patching.instance import hooked

Answer = TypeVar("Answer")
PLAIN = (bool, int, float, str, type(None))


def stand_in(module: nn.Module, **attributes: Any) -> nn.Module:
    """An instance of the module's class with its plain attributes and the given parameters or submodules."""
    new: nn.Module = object.__new__(type(module))
    nn.Module.__init__(new)
    for name, value in vars(module).items():
        if isinstance(value, PLAIN) and not name.startswith("_"):
            setattr(new, name, value)
    for name, value in attributes.items():
        setattr(new, name, value)
    # not eval(), which would reach into a submodule that the stand-in borrows from the model
    new.training = False
    return new


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal numbers from a generator of their own: the process's random state is not touched."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def interfered(function: Any) -> bool:
    """Whether this is a module with hooks or a forward of its own: what it computes its class does not say."""
    return isinstance(function, nn.Module) and hooked(function)


def remembered(answers: weakref.WeakKeyDictionary[Any, Answer], key: Any, find: Callable[[], Answer]) -> Answer:
    """`find()`, once for each live key."""
    if key not in answers:
        answers[key] = find()
    return answers[key]
