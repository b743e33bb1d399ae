"""The gradient of every row's own loss, one row not seeing another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from opake.errors import InputError
from opake.functional.call import check_call
from opake.functional.chunk import Engine
from opake.functional.engines import Chooser, check_options
from opake.functional.rows import Rows, check_microbatch_size
from opake.functional.target import resolve


def per_example_grads(
    target: Callable | torch.nn.Module,
    *,
    has_aux: bool = False,
    in_dims: Any = None,
    randomness: str = "different",
    microbatch_size: int | None = None,
    engine: str = "auto",
) -> Callable[..., Any]:
    """A function `f(params, *rows, **rows) -> {name: (B, *shape)}` of the gradients of each row's own loss.

    target: a function `loss(params, *row, **row) -> scalar` of one row (`(scalar, aux)` with `has_aux`), or a model
        patched by `opake.patches.apply_model_patches`, or any other module whose forward returns a mapping with "loss".
        The rows of a model are keyword tensors with a leading batch dimension, and its own loss of each row is used.
    params: `{name: tensor}`, floating point in any dtype. Parameters of a model left out are frozen. The gradients have
        the parameters' dtypes.
    in_dims: the row dimension of every argument, 0 if not given; None for what all rows share. See `vmap`: an int, a
        tuple for positional rows, or a mapping for rows by name.
    randomness: "different" (each row draws its own dropout mask), "same" or "error", as in `torch.vmap`.
    microbatch_size: rows at a time; the gradients do not depend on it, the memory of activations does.
    engine: "vmap", "batched" (plain autograd, for models whose ops all know the example axis) or "auto".
    has_aux: `f` returns `(grads, aux)`, aux with a leading B; for a model, aux are its other output tensors.

    With zero rows the gradients are (0, *shape), aux is None, and neither function nor model is called.

    Raises InputError for rows that disagree in number, unknown names or wrong shapes, and a loss that is no scalar;
    OptionTypeError for arguments of a wrong type; PatchError for a Transformers model that is not (or no longer)
    patched; EngineUnavailable where `engine="batched"` cannot serve the target.
    """
    check_options(engine, randomness)
    check_microbatch_size(microbatch_size)
    resolved = resolve(target, has_aux)
    choose = Chooser(resolved, engine, randomness, has_aux)

    def f(params: Mapping[str, torch.Tensor], /, *args: Any, **kwargs: Any) -> Any:
        rows = check_call(resolved, params, args, kwargs, in_dims)
        with resolved.alone:
            choice = choose(params, rows)
            if rows.count == 0:
                grads = {name: p.new_zeros((0, *p.shape)) for name, p in params.items()}
                return (grads, None) if has_aux else grads
            grads, aux = _collect(choice.run, params, rows, microbatch_size)
        return (grads, aux) if has_aux else grads

    return _named_after(f, target)


def _collect(run: Engine, params: Mapping[str, torch.Tensor], rows: Rows, size: int | None) -> tuple[dict, Any]:
    """Gradients and aux of all rows, microbatch by microbatch, written into place."""
    if size is None or size >= rows.count:
        chunk = run(params, rows)
        return {name: _owned(grad) for name, grad in chunk.grads.items()}, chunk.aux
    grads = {name: p.new_empty((rows.count, *p.shape)) for name, p in params.items()}
    parts = []
    for place, piece in rows.microbatches(size):
        chunk = run(params, piece)
        for name in grads:
            grads[name][place] = chunk.grads.pop(name)
        parts.append(chunk.aux)
    return grads, concatenated(parts)


def concatenated(parts: list[Any]) -> Any:
    """Nested values of microbatches, joined along their leading dimension."""
    flat = [tree_flatten(part) for part in parts]
    specs = {str(spec) for _, spec in flat}
    if len(specs) > 1:
        raise InputError(f"aux has another structure in another microbatch: {' and '.join(sorted(specs))}")
    return tree_unflatten(
        [torch.cat(pieces) for pieces in zip(*(leaves for leaves, _ in flat), strict=True)], flat[0][1]
    )


def _owned(grad: torch.Tensor) -> torch.Tensor:
    """A parameter that the loss does not use gets zeros expanded over the rows; they are made real."""
    expanded = grad.untyped_storage().nbytes() < grad.numel() * grad.element_size()
    return grad.contiguous() if expanded else grad


def _named_after(f: Callable, target: Any) -> Callable:
    name = getattr(target, "__name__", type(target).__name__)
    f.__name__ = f.__qualname__ = f"per_example_grads({name})"
    return f
