"""Rematerialisation under `torch.func` transforms: keep the inputs of a call, run it again for the backward.

It is a pair of autograd Functions. The first runs the call and saves its inputs alone. The second runs the call again
and pulls the cotangents back as one opaque node: without it `torch.func.grad`, which always builds the graph of the
double backward, would keep the recomputed activations alive and nothing would be saved. Both carry
`generate_vmap_rule=True`, because their bodies are ordinary torch code. Every parameter, buffer and argument tensor is
lifted into the arguments of the Function, so that each is seen at its own level of nesting.

The method is that of Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". Double backward and forward
mode are not offered.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from opake.checkpoint.reach import Reach, flatten_partial, reach
from opake.checkpoint.replay import Replay
from opake.errors import InputError, OpakeError
from opake.rows.lazy_sum import plain
from opake.swap import Places
from opake.transforms import inside_transform

_running = contextvars.ContextVar("opake_remat_running", default=False)


def remat(fn: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """Call `fn(*args, **kwargs)` without keeping its activations; its backward runs it once more.

    `fn` is a module, a bound method of one, a `functools.partial` of either, a function called with its module as
    first argument, or a function whose closure holds nothing but modules and constants. Arguments and outputs may be
    nested in tuples, lists and dicts and may hold anything besides tensors; outputs have the shapes and dtypes that
    `fn` gives. Works in plain autograd and at any nesting of `vmap`, `grad` and `vjp`; dropout is replayed (under
    `vmap`, `randomness="different"`). Frozen parameters get no gradient computed. A `remat` inside a `remat` is a
    plain call.

    Raises InputError if `fn` captures a tensor that is being differentiated or mapped: pass it as an argument.
    """
    fn, args, kwargs = flatten_partial(fn, args, kwargs)
    reached = reach(fn, args, kwargs)
    if reached.obstacle is not None:
        name = getattr(fn, "__qualname__", repr(fn))
        raise InputError(f"remat({name}): {reached.obstacle}; it would get no gradient. Pass it as an argument")
    return remat_reached(fn, args, kwargs, reached)


def remat_reached(
    fn: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    reached: Reach,
    *,
    preserve_rng: bool = True,
    away: bool = False,
) -> Any:
    """`remat` for a call that is known to be liftable. away: what flows into it waits for the backward on the CPU."""
    if _running.get() or not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    call = _Call(fn, args, kwargs, reached.modules, preserve_rng=preserve_rng)
    call.away = away
    # the call outlives its forward: what it held of its inputs could not be sent away
    tensors, call.tensors = call.tensors, ()
    return call.rebuild(_Remat.apply(call, *tensors))


class _Call:
    """A call as a function of its tensors: parameters and buffers of its modules, then the tensors in its arguments."""

    def __init__(
        self, fn: Callable, args: tuple, kwargs: Mapping[str, Any], modules: Sequence[torch.nn.Module], *, preserve_rng
    ) -> None:
        self._fn, self._places = fn, Places(*modules)
        leaves, self._spec = tree_flatten((self._places.tensors, args, kwargs))
        self._slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.tensors: tuple[torch.Tensor, ...] = tuple(leaves[i] for i in self._slots)
        self.replay = Replay(self.tensors, preserve_rng=preserve_rng)
        self.away, self.given = False, len(self._places.tensors)
        self._out_spec: TreeSpec | None = None
        self._out_rest: list[Any] = []

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run with these tensors; the tensors of the output, flat, no one of them an input itself."""
        leaves = list(self._rest)
        for slot, tensor in zip(self._slots, tensors, strict=True):
            leaves[slot] = tensor
        state, args, kwargs = tree_unflatten(leaves, self._spec)
        with _nested_off(), self._places.holding(state):
            out = self._fn(*args, **kwargs)
        # a sum that is still to be taken would carry its graph past the Function
        outs, self._out_spec = tree_flatten(tree_map(plain, out))
        self._out_rest = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in outs]
        handed_in = {id(t) for t in tensors}
        # an output that is an input unchanged would be marked as one by autograd
        return tuple(t.view_as(t) if id(t) in handed_in else t for t in outs if isinstance(t, torch.Tensor))

    def differentiable(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(out for out in self(*tensors) if out.is_floating_point() or out.is_complex())

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The output in the form that the function gave it."""
        given = iter(tensors)
        assert self._out_spec is not None
        return tree_unflatten([next(given) if leaf is _TENSOR else leaf for leaf in self._out_rest], self._out_spec)


_TENSOR = object()


@contextlib.contextmanager
def _nested_off() -> Iterator[None]:
    token = _running.set(True)
    try:
        yield
    finally:
        _running.reset(token)


class _Remat(torch.autograd.Function):
    """Forward: run the call, save its inputs alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: _Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outs = call(*tensors)
        call.replay.drop_unused_rng()
        return outs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, ...]) -> None:
        ctx.call, kept = inputs[0], list(inputs[1:])
        ctx.devices = _send_away(kept, ctx.needs_input_grad[1:], ctx.call.given) if ctx.call.away else {}
        ctx.save_for_backward(*kept)
        ctx.floating = tuple(out.is_floating_point() or out.is_complex() for out in output)
        ctx.mark_non_differentiable(*(out for out, floating in zip(output, ctx.floating, strict=True) if not floating))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors = list(ctx.saved_tensors)
        for i, device in ctx.devices.items():
            tensors[i] = tensors[i].to(device, non_blocking=True)
        needed = tuple(i for i in range(len(tensors)) if ctx.needs_input_grad[i + 1])
        flowing = [c for c, floating in zip(cotangents, ctx.floating, strict=True) if floating]
        grads: list[torch.Tensor | None] = [None] * len(tensors)
        pulled = _RematBackward.apply(ctx.call, needed, len(flowing), *flowing, *tensors)
        for i, grad in zip(needed, pulled, strict=True):
            grads[i] = grad
        return (None, *grads)


def _send_away(tensors: list[torch.Tensor], needs: Sequence[bool], given: int) -> dict[int, torch.device]:
    """Move the arguments that gradients flow through to the CPU, in place; where each came from.

    What the layers of a model share (masks, tables) and the `given` parameters stay where they are. A CUDA graph keeps
    the memory of its step anyway, so under capture nothing moves.
    """
    devices = {}
    for i in range(given, len(tensors)):
        if needs[i] and tensors[i].is_cuda and not torch.cuda.is_current_stream_capturing():
            devices[i] = tensors[i].device
            tensors[i] = tensors[i].to("cpu", non_blocking=True)
    return devices


class _RematBackward(torch.autograd.Function):
    """Backward as one opaque node: run the call again and pull the cotangents back to the inputs that need it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: _Call, needed: tuple[int, ...], count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cotangents, inputs = tensors[:count], tensors[count:]

        def of_needed(*primals: torch.Tensor) -> tuple[torch.Tensor, ...]:
            full = list(inputs)
            for i, primal in zip(needed, primals, strict=True):
                full[i] = primal
            return call.differentiable(*full)

        with call.replay():
            return pull_back(of_needed, [inputs[i] for i in needed], cotangents)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise OpakeError(
            "remat: double backward is not supported; call the function without remat to differentiate twice"
        )


def pull_back(
    fn: Callable[..., tuple[torch.Tensor, ...]], primals: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Vector-Jacobian product of `fn` that keeps no graph of itself; zeros where a primal does not matter."""
    if inside_transform():
        vjp_fn = torch.func.vjp(fn, *primals)[1]
        # without these two, which torch does not document, the graph of a double backward would be kept
        return vjp_fn(tuple(cotangents), retain_graph=False, create_graph=False)
    with torch.enable_grad():
        leaves = [primal.detach().requires_grad_() for primal in primals]
        pairs = [(out, c) for out, c in zip(fn(*leaves), cotangents, strict=True) if out.requires_grad]
    if not pairs:
        return tuple(map(torch.zeros_like, leaves))
    outs, flowing = zip(*pairs, strict=True)
    grads = torch.autograd.grad(outs, leaves, flowing, allow_unused=True)
    return tuple(torch.zeros_like(p) if g is None else g for p, g in zip(leaves, grads, strict=True))
