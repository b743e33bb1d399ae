"""A shorter road from `Function.apply` to the kernel than torch's own, for flat arguments and fresh outputs.

Under functorch, `Function.apply` makes a new class for each call at each level of `grad` and flattens all arguments as
a pytree several times: most of a millisecond for a kernel of microseconds. Here the class is made once and the levels
are walked directly, by the same steps as in `torch._functorch.autograd_function`: lift, unwrap, lower the stack, call,
wrap. The primitives are torch's internal ones; where one is missing, or for a transform other than vmap and grad, the
call goes through `Function.apply`, which gives the same result. Leaves out outputs that alias inputs and keywords.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import Function, forward_ad

__all__ = ["SHORT_ROAD", "alive", "eagerly", "short_apply", "transforms_active", "values_readable"]

try:
    from torch._C._functorch import (
        TransformType,
        _add_batch_dim,
        _unwrap_batched,
        _unwrap_for_grad,
        _wrap_for_grad,
        get_single_level_autograd_function_allowed,
        set_single_level_autograd_function_allowed,
        unwrap_if_dead,
    )
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
    from torch.autograd.forward_ad import _set_fwd_grad_enabled
    from torch.autograd.function import _SingleLevelFunction

    SHORT_ROAD = True
except ImportError:
    SHORT_ROAD = False


try:
    # what torch.compile makes of Python frames on this thread; None outside compiled code
    from torch._C._dynamo.eval_frame import get_eval_frame_callback as _compiler_at_work
except ImportError:

    def _compiler_at_work() -> Any:
        return sys.modules.get("torch._dynamo")


def eagerly(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)`, kept out of `torch.compile` where that is at work, in this frame or in one further up."""
    if torch.compiler.is_compiling() or _compiler_at_work() is not None:
        # imported here, so that the compiler is only where it is used
        from .compiled import outside_graph

        return outside_graph(fn, *args)
    return fn(*args)


class _Info(NamedTuple):
    """What a vmap rule is told; `randomness` is nothing to a kernel."""

    batch_size: int


def transforms_active() -> bool:
    """True inside any `torch.func` transform."""
    return torch._C._are_functorch_transforms_active()


def values_readable() -> bool:
    """False where the values of a tensor may not be looked at: inside a transform, or under compilation."""
    return not torch.compiler.is_compiling() and not transforms_active()


def alive(tensors: Any) -> list[Any]:
    """The tensors, freed of the wrappers of transforms that have ended (a pull-back called outside its `vjp`)."""
    return _map(unwrap_if_dead, tensors) if SHORT_ROAD else list(unwrap_dead_wrappers(tuple(tensors)))


def _map(fn: Callable[[torch.Tensor], Any], args: Any, kind: type = torch.Tensor) -> list[Any]:
    return [fn(a) if isinstance(a, kind) else a for a in args]


def _wrap(output: Any, wrap: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(output, tuple):
        return tuple([wrap(o) for o in output])
    return wrap(output)


def short_apply(cls: Any) -> Callable[..., Any]:
    """The counterpart of `cls.apply`. `cls` defines forward, setup_context, backward and vmap (with out_dims 0)."""
    if not SHORT_ROAD:
        return cls.apply
    # the C++ apply, without the binding of default arguments in front of it
    plain = super(Function, cls).apply  # pyright: ignore[reportAttributeAccessIssue]
    single = _single_level(cls, lambda *args: apply(*args))

    def apply(*given: Any) -> Any:
        args = _map(unwrap_if_dead, given)
        if not transforms_active():
            # where gradients are on, the C++ apply sees for itself whether one is needed
            return plain(*args) if torch.is_grad_enabled() or _forward_mode() else cls.forward(*args)
        interpreter = retrieve_current_functorch_interpreter()
        kind = interpreter.key()
        if kind == TransformType.Vmap:
            return _through_vmap(cls, apply, interpreter, args)
        if kind == TransformType.Grad:
            return _through_grad(single, interpreter, args)
        return cls.apply(*args)

    return apply


def _forward_mode() -> bool:
    return getattr(forward_ad, "_current_level", 0) >= 0


def _through_vmap(cls: Any, apply: Callable[..., Any], interpreter: Any, args: list[Any]) -> Any:
    level = interpreter.level()
    pairs = [_unwrap_batched(a, level) if isinstance(a, torch.Tensor) else (a, None) for a in args]
    dims = [dim for _, dim in pairs]
    if all(dim is None for dim in dims):
        with interpreter.lower():
            return apply(*args)
    with interpreter.lower():
        output, _ = cls.vmap(_Info(interpreter.batch_size()), dims, *[a for a, _ in pairs])
    return _wrap(output, lambda o: _add_batch_dim(o, 0, level))


def _through_grad(single: Any, interpreter: Any, args: list[Any]) -> Any:
    # a constant of this level may require a gradient at an outer one: lifting hides that
    args = _map(interpreter._cptr.lift, args)
    if not torch.is_grad_enabled():
        # nothing to record, as in a backward that keeps no graph
        return single.forward(*args, interpreter)
    allowed = get_single_level_autograd_function_allowed()
    set_single_level_autograd_function_allowed(True)
    try:
        return single.apply(*args, interpreter)
    finally:
        set_single_level_autograd_function_allowed(allowed)


def _single_level(cls: Any, apply: Callable[..., Any]) -> Any:
    """`cls` at one level of grad; the interpreter travels as the last argument."""

    class Single(_SingleLevelFunction):
        @staticmethod
        def forward(*args: Any) -> Any:
            interpreter = args[-1]
            level = interpreter.level()
            inner = _map(lambda t: _unwrap_for_grad(t, level), args[:-1])
            # the C++ apply switched both off; the levels below may need them
            with torch.enable_grad(), _set_fwd_grad_enabled(True), interpreter.lower():
                output = apply(*inner)
            return _wrap(output, lambda o: _wrap_for_grad(o, level))

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            cls.setup_context(ctx, inputs[:-1], output)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return (*cls.backward(ctx, *grads), None)

    Single.__name__ = Single.__qualname__ = cls.__name__
    return Single
