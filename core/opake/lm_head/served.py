"""Operations that deferred logits serve by themselves, for those arguments that they name, and decline otherwise.

A handler has the name of what it stands for and returns NotImplemented to decline. What it does not name (`out=`, a
rounding mode, another form of the same call) declines by itself, so that no handler has to know all of a signature.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

# asked once a handler: torch.compile traces neither this question nor a cache of it
_signatures: dict[Callable[..., Any], inspect.Signature] = {}


def handler(serve: Callable[..., Any]) -> Callable[..., Any]:
    """Make `serve` known to `attempt`; its first argument is the deferred logits."""
    _signatures[serve] = inspect.signature(serve)
    return serve


def or_computed(reason: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The decorator of a handler that is a method of tensors: where it declines, logits are computed for `reason`."""

    def decorate(serve: Callable[..., Any]) -> Callable[..., Any]:
        handler(serve)

        @functools.wraps(serve)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = attempt(serve, (self, *args), kwargs)
            return getattr(self.value(reason), serve.__name__)(*args, **kwargs) if found is NotImplemented else found

        return method

    return decorate


def attempt(serve: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a handler makes of a call; NotImplemented where it declines or the logits are there already."""
    if args[0].tensor is not None:
        return NotImplemented
    try:
        _signatures[serve].bind(*args, **kwargs)
    except TypeError:
        return NotImplemented
    return serve(*args, **kwargs)
