"""Gradient checkpointing of one model: rematerialisation inside transforms, the user's own choice outside.

The functions that the model's layers checkpoint through are wrapped where they are, and those that a later
`gradient_checkpointing_enable()` installs as well. The hooks that mark embeddings as requiring a gradient, which no
transform allows, are silent inside transforms: remat needs no such mark. Restore unwraps whatever is there by then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from opake import hf
from opake.checkpoint.guard import RematCheckpoint
from opake.patching.instance import wrap_method
from opake.patching.undo import Undo
from opake.transforms import inside_transform

FUNCTION = "_gradient_checkpointing_func"
ENABLERS = ("_set_gradient_checkpointing", "enable_input_require_grads")


class GuardedHook:
    """A forward hook that does nothing inside a transform."""

    def __init__(self, stock: Callable[..., Any]) -> None:
        self.stock = stock
        self.__name__ = getattr(stock, "__name__", "hook")

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        return None if inside_transform() else self.stock(module, inputs, output)


def apply(model: nn.Module, wrappers: tuple[nn.Module, ...]) -> Undo:
    del wrappers
    wrap_all(model)
    changes = [wrap_method(model, name, _then_wrap) for name in ENABLERS if hasattr(model, name)]
    return Undo(changes, unwrap_all, (model,))


def _then_wrap(inner: Callable[..., Any], self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    result = inner(self, *args, **kwargs)
    wrap_all(self)
    return result


def wrap_all(model: nn.Module) -> None:
    """Wrap every checkpointing function and input-gradient hook of the model that is not wrapped yet."""
    shared: dict[int, RematCheckpoint] = {}
    for module in model.modules():
        stock = vars(module).get(FUNCTION)
        if stock is not None and not isinstance(stock, RematCheckpoint):
            vars(module)[FUNCTION] = shared.setdefault(id(stock), RematCheckpoint(stock))
        for key, hook in list(module._forward_hooks.items()):
            if getattr(hook, "__name__", "").startswith(hf.INPUT_GRAD_HOOK) and not isinstance(hook, GuardedHook):
                module._forward_hooks[key] = GuardedHook(hook)


def unwrap_all(model: nn.Module) -> None:
    """The functions and hooks themselves again."""
    for module in model.modules():
        held = vars(module).get(FUNCTION)
        if isinstance(held, RematCheckpoint):
            vars(module)[FUNCTION] = held.stock
        for key, hook in list(module._forward_hooks.items()):
            if isinstance(hook, GuardedHook):
                module._forward_hooks[key] = hook.stock
