"""An op as one opaque node of a compiled graph: what `torch.compile` makes of a pair of Functions (fold.py).

The pair's forward and backward become two operators of torch's dispatcher that the compiler calls and never looks into,
so that the code around an op stays one graph, for any lengths. Only outside transforms: such operators do not work
under `torch.func.grad`, where the op leaves the graph instead (compiled.py). An operator takes tensors and one string;
the string stands for everything else and spells it out, so that a graph kept on disk cannot mean another setting in
another process. Results are dense, which a compiler has to know beforehand; the eager op may follow its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["Outline", "opaque"]

# (*tensors, groups, *settings) -> (shape, dtype) of each result of forward
Outline = Callable[..., Sequence[tuple[Sequence[int], torch.dtype]]]

_LIBRARY = torch.library.Library("opake_kernels", "FRAGMENT")
_VALUES: dict[str, Any] = {}


def _taken_apart(value: Any) -> Any:
    """Records and tuples as (type, *parts): the compiler knows a record made under compilation by its parts alone."""
    if isinstance(value, tuple):
        return (type(value), *[_taken_apart(v) for v in value])
    if hasattr(value, "__dataclass_fields__"):
        return (type(value), *[_taken_apart(getattr(value, name)) for name in type(value).__slots__])
    return value


def _put_together(parts: Any) -> Any:
    if not isinstance(parts, tuple):
        return parts
    kind, *values = parts
    values = [_put_together(v) for v in values]
    return tuple(values) if kind is tuple else kind(*values)


def _key(parts: Any) -> str:
    """The string that stands for what was taken apart; equal settings have equal strings."""
    value = _put_together(parts)
    key = repr(value)
    _VALUES[key] = value
    return key


# the compiler calls it while it traces, and keeps the string
_key._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _filled(tensors: Sequence[torch.Tensor], present: Sequence[bool]) -> list[torch.Tensor | None]:
    given = iter(tensors)
    return [next(given) if there else None for there in present]


def _own(results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results, dense and apart from the inputs and from one another, as an operator's have to be."""
    seen = {t.untyped_storage().data_ptr() for t in inputs}
    own = []
    for result in results:
        result = result.contiguous()
        if result.untyped_storage().data_ptr() in seen:
            result = result.clone(memory_format=torch.contiguous_format)
        seen.add(result.untyped_storage().data_ptr())
        own.append(result)
    return own


def _empty(like: torch.Tensor, outlines: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=dtype, device=like.device) for shape, dtype in outlines]


def _define(name: str, arguments: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    _LIBRARY.define(f"{name}({arguments}) -> Tensor[]")
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"opake_kernels::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.opake_kernels, name).default


def _define_forward(name: str, forward: Callable[..., Any], outline: Outline) -> Any:
    def run(tensors: Sequence[torch.Tensor], key: str) -> list[torch.Tensor]:
        present, settings = _VALUES[key]
        found = forward(*_filled(tensors, present), *settings)
        return _own(found if isinstance(found, tuple) else (found,), tensors)

    def fake(tensors: Sequence[torch.Tensor], key: str) -> list[torch.Tensor]:
        present, settings = _VALUES[key]
        return _empty(tensors[0], outline(*_filled(tensors, present), *settings))

    return _define(name, "Tensor[] tensors, str key", run, fake)


def _define_backward(name: str, backward: Callable[..., Any], outputs: int) -> Any:
    """(gradients and saved tensors, the sizes of the gradients that are wanted one after the other) -> those."""

    def run(tensors: Sequence[torch.Tensor], sizes: Sequence[int], key: str) -> list[torch.Tensor]:
        present, need, _likes, settings = _VALUES[key]
        full = _filled(tensors, present)
        found = backward(full[:outputs], full[outputs:], need, *settings)
        return _own([g for g, wanted in zip(found, need, strict=True) if wanted], tensors)

    def fake(tensors: Sequence[torch.Tensor], sizes: Sequence[int], key: str) -> list[torch.Tensor]:
        _present, _need, likes, _settings = _VALUES[key]
        rest = iter(sizes)
        return _empty(tensors[0], [([next(rest) for _ in range(dims)], dtype) for dims, dtype in likes])

    return _define(name, "Tensor[] tensors, SymInt[] sizes, str key", run, fake)


def opaque(
    name: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    outline: Outline,
    n_in: int,
    outputs: int,
    save: Callable[..., list[torch.Tensor | None]],
) -> Callable[..., Any]:
    """The counterpart of a pair's call, for code under compilation.

    save(inputs, outputs, needs) chooses what backward is given; the rest is as in `function_pair`.
    """
    op = _define_forward(name, forward, outline)
    back = _define_backward(f"{name}_backward", backward, outputs)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        tensors, key = inputs
        present, settings = _VALUES[key]
        full = _filled(tensors, present)
        need = tuple([t is not None and t.requires_grad for t in full])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[outputs:])
        ctx.save_for_backward(*save(full, output, need))
        ctx.wanted = [t.requires_grad for t in tensors]
        ctx.sizes = [size for t in tensors if t.requires_grad for size in t.shape]
        ctx.rest = need, tuple([(t.dim(), t.dtype) for t in tensors if t.requires_grad]), settings

    def backward_of(ctx: Any, grads: Any) -> Any:
        if all(g is None for g in grads[:outputs]):
            return [None for _ in ctx.wanted], None
        tensors = [*grads[:outputs], *ctx.saved_tensors]
        key = _key(_taken_apart((tuple([t is not None for t in tensors]), *ctx.rest)))
        found = iter(back([t for t in tensors if t is not None], ctx.sizes, key))
        return [next(found) if wanted else None for wanted in ctx.wanted], None

    torch.library.register_autograd(f"opake_kernels::{name}", backward_of, setup_context=setup_context, lib=_LIBRARY)

    def call(*args: Any) -> Any:
        tensors = args[:n_in]
        key = _key(_taken_apart((tuple([t is not None for t in tensors]), tuple(args[n_in:]))))
        found = op([t for t in tensors if t is not None], key)
        return found[0] if len(found) == 1 else tuple(found)

    return call
