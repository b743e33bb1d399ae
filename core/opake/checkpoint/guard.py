"""Checkpointing that asks where it runs: the stock function outside transforms, rematerialisation inside them.

`torch.utils.checkpoint` uses saved-tensor hooks, or a Function without a `vmap` rule, and functorch refuses both.
`RematCheckpoint` takes the place of one model's own checkpointing function; `guarded_checkpoint` wraps the process-wide
one for models that call it by name. Putting either in its place, and taking it back, is the patch engine's work.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.utils.checkpoint

from opake.checkpoint.norms import recomputed_norms
from opake.checkpoint.reach import flatten_partial, reach
from opake.checkpoint.rematerialise import remat_reached
from opake.checkpoint.step import batched_step, inside_step
from opake.errors import OpakeWarning

# keywords that torch.utils.checkpoint.checkpoint keeps for itself; it takes preserve_rng_state out of **kwargs
_OWN_KEYWORDS = frozenset(
    name
    for name, parameter in inspect.signature(torch.utils.checkpoint.checkpoint).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY or name == "use_reentrant"
) | {"preserve_rng_state"}


@contextlib.contextmanager
def rematerialised() -> Iterator[None]:
    """For the time of the block, checkpoints rematerialise outside transforms too.

    torch's reentrant checkpoint finds no way to a frozen input's parameters, and gives them no gradient, in silence.
    The outputs of norms are computed again as well (see `norms`).
    """
    with batched_step(), recomputed_norms():
        yield


class RematCheckpoint:
    """What a model's `_gradient_checkpointing_func` becomes: remat inside a transform, `stock` outside.

    Called as `checkpoint(fn, *args, **kwargs)` with `fn` a module, a bound method of one, or a partial of a forward
    with its module, which is how Transformers calls it in every version.
    """

    __slots__ = ("_warned", "away", "stock")

    def __init__(self, stock: Callable) -> None:
        self.stock = stock
        self.away = _saves_on_cpu(stock)
        self._warned = False

    def __call__(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        if not inside_step():
            return self.stock(function, *args, **kwargs)
        return self._inside(function, args, kwargs)

    def _inside(self, function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        own = {name: value for name, value in kwargs.items() if name in _OWN_KEYWORDS}
        rest = {name: value for name, value in kwargs.items() if name not in _OWN_KEYWORDS}
        fn, args, rest = flatten_partial(function, args, rest)
        reached = reach(fn, args, rest)
        if reached.obstacle is None:
            keep = own.get("preserve_rng_state", True)
            return remat_reached(fn, args, rest, reached, preserve_rng=keep, away=self.away)
        self._warn(fn, reached.obstacle)
        return fn(*args, **rest)

    def _warn(self, fn: Callable, obstacle: str) -> None:
        if self._warned:
            return
        self._warned = True
        name = getattr(fn, "__qualname__", repr(fn))
        warnings.warn(
            f"checkpoint({name}) runs without rematerialisation inside a torch.func transform: {obstacle}. "
            "Gradients are right, memory is not saved; pass a module, or every tensor as an argument",
            OpakeWarning,
            stacklevel=4,
        )


def _saves_on_cpu(stock: Callable) -> bool:
    """Whether a checkpointing function keeps what it saves on the CPU, as Transformers' `offload=True` makes it."""
    fn = stock.func if isinstance(stock, functools.partial) else stock
    code = getattr(fn, "__code__", None)
    return code is not None and "save_on_cpu" in code.co_names


def guarded_checkpoint(original: Callable) -> Callable:
    """`original` (torch.utils.checkpoint.checkpoint) outside transforms; inside, remat where it is safe.

    Where the function captures tensors, which would be caught at the wrong level, it is called plainly, and one
    warning says so. The result has the name and signature of `original` and holds it as `__wrapped__`.
    """
    checkpoint = RematCheckpoint(original)

    @functools.wraps(original)
    def guarded(function: Callable, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(function, *args, **kwargs)

    return guarded
