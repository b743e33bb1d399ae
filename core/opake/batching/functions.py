"""`torch.autograd.Function`s of the old form (`forward(ctx, ...)`) inside transforms, which take the new form only.

A function of the old form gets a twin of the new one that calls its own forward and backward; the forwards that apply
it see the twin inside transforms, and the function itself elsewhere. Functions that save anything but their inputs, or
keep numbers on the context, are refused: what they need is lost between forward and backward of the new form.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import _SingleLevelFunction

from opake.patching.instance import rebind, unbound
from opake.patching.replace import globals_read, overlay
from opake.patching.undo import Undo
from opake.transforms import inside_transform


def sites(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules whose forward applies such a function, itself or through a helper; patched ones too."""
    for name, module in model.named_modules():
        if _replacements(module, patched=True):
            yield name, module


def apply(module: nn.Module) -> Undo:
    return overlay(module, _replacements(module))


class Applied:
    """Stands in for a function of the old form: `.apply` takes the twin inside transforms."""

    def __init__(self, old: type[torch.autograd.Function]) -> None:
        self.old = old

    def apply(self, *args: Any) -> Any:
        return (twin(self.old) if inside_transform() else self.old).apply(*args)


class _Recorder:
    """The context that a forward of the old form is given; it notes which of its inputs are saved."""

    def __init__(self) -> None:
        self.saved: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved = tensors


@functools.cache
def twin(old: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """The function `old` in the new form, with a `vmap` rule made by torch."""
    forward: Callable[..., Any] = old.forward
    backward: Callable[..., Any] = old.backward
    places: tuple[int, ...] = ()

    class Twin(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*args: Any) -> Any:
            nonlocal places
            recorder = _Recorder()
            out = forward(recorder, *args)
            # the same at every call: which inputs a function saves is written in its code
            places = _places(old, recorder, args)
            return out

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.save_for_backward(*(inputs[place] for place in places))

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return backward(ctx, *grads)

    Twin.__name__ = Twin.__qualname__ = old.__name__
    return Twin


def _places(old: type, recorder: _Recorder, args: tuple[Any, ...]) -> tuple[int, ...]:
    places = tuple(next((i for i, arg in enumerate(args) if arg is saved), -1) for saved in recorder.saved)
    extra = sorted(vars(recorder).keys() - {"saved"})
    if -1 in places or extra:
        what = f"ctx.{extra[0]}" if extra else "a tensor that is not an input"
        raise NotImplementedError(
            f"{old.__module__}.{old.__name__} saves {what} for its backward, so it cannot run inside torch.func "
            "transforms; give it the form with setup_context (see torch's notes on extending autograd)"
        )
    return places


def _replacements(module: nn.Module, patched: bool = False) -> dict[str, Any]:
    """Stand-ins by name, with `patched` also for what is a stand-in already."""
    home = getattr(unbound(module, "forward"), "__module__", "")
    kinds = (type, FunctionType, Applied)
    found: dict[str, Any] = {}
    for name, value in globals_read(module, lambda value: isinstance(value, kinds)).items():
        if is_old(value):
            found[name] = Applied(value)
        elif patched and isinstance(value, Applied):
            found[name] = value
        elif isinstance(value, FunctionType) and value.__module__ == home:
            inner = {key: _global(value, key) for key in value.__code__.co_names}
            old = {key: Applied(held) for key, held in inner.items() if is_old(held)}
            if old or (patched and any(isinstance(held, Applied) for held in inner.values())):
                found[name] = rebind(value, old)
    return found


def _global(function: FunctionType, name: str) -> Any:
    return function.__globals__.get(name)


def is_old(value: Any) -> bool:
    """Whether this is an autograd function without a `setup_context` of its own."""
    if not isinstance(value, type) or not issubclass(value, torch.autograd.Function):
        return False
    return value is not torch.autograd.Function and value.setup_context is _SingleLevelFunction.setup_context
