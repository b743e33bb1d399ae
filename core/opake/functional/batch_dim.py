"""Let a function that was written for batches take the single rows that `vmap` hands out.

Under `vmap` a row arrives as (T,) where the model expects (B, T). The wrapper adds a leading dimension of one to the
arguments it was told about and removes it from the outputs; a call that is already batched passes through unchanged.
Nothing is decided by the contents of a tensor.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from opake.errors import InputError, OptionTypeError
from opake.functional.nested import map_tensors, tensors_of


def with_batch_dim(
    fn: Callable,
    batch_argnums: int | Iterable[int] | None = None,
    batch_kwargs: Mapping[str, int] | Iterable[str] | None = None,
    min_ndim: int | None = None,
) -> Callable:
    """Wrap `fn` so that the named arguments gain a leading batch dimension of one, and its outputs lose it.

    Two forms, which may be combined:

    - `batch_argnums`: positions of arguments that get `unsqueeze(0)`; with `min_ndim`, only where they have fewer
      dimensions than that. An argument may be a nested structure of tensors.
    - `batch_kwargs`: `{name: ndim}`; the argument of that name, passed by keyword or by position, gets `unsqueeze(0)`
      where it has fewer than `ndim` dimensions. A plain list of names takes `min_ndim` for all.

    None and absent arguments are left alone. Where anything was unsqueezed, each tensor of the output with a leading
    dimension of one loses it, also in tuples, lists, mappings and a `ModelOutput`; scalars stay. Where nothing was, the
    output is the very object that `fn` returned. Name, docstring and signature are those of `fn`.

    Raises:
        InputError: a name or position that `fn` does not have; or, in a call, single rows mixed with a real batch.
        OptionTypeError: neither form was chosen, a number of dimensions is missing, or an argument to be unsqueezed
            holds no tensor.
    """
    takes = _signature(fn)
    rules = _rules(_name(fn), takes, batch_argnums, batch_kwargs, min_ndim)

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        args_in, kwargs_in = list(args), dict(kwargs)
        touched: list[tuple[str, int, bool]] = []
        for place, value, put in _arguments(takes.positional, args_in, kwargs_in):
            rule = rules.get(place)
            if rule is not None and value is not None:
                put(_unsqueezed(fn, rule, value, touched))
        if not any(added for *_, added in touched):
            return fn(*args, **kwargs)
        _check_one_row(fn, touched)
        return map_tensors(_squeezed, fn(*args_in, **kwargs_in))

    # `apply_model_patches` looks for it: a forward that does this by hand and is patched as well would do it twice
    wrapped.adds_batch_dim = True  # type: ignore[attr-defined]
    return wrapped


class _Rule(NamedTuple):
    """How one argument is treated: its name in messages, and below how many dimensions it gains one (None: always)."""

    label: str
    below: int | None


def _rules(name: str, takes: _Signature, argnums: Any, kwargs: Any, min_ndim: int | None) -> dict[int | str, _Rule]:
    if argnums is None and kwargs is None:
        raise OptionTypeError("with_batch_dim needs batch_argnums or batch_kwargs: which arguments lack the batch?")
    rules: dict[int | str, _Rule] = {}
    for number in [argnums] if isinstance(argnums, int) else argnums or ():
        if isinstance(number, bool) or not isinstance(number, int):
            raise OptionTypeError(f"batch_argnums holds positions, got {number!r} ({type(number).__name__})")
        known = 0 <= number < len(takes.positional)
        if number < 0 or not (known or takes.open_args):
            raise InputError(
                f"batch_argnums has {number}, but {name} takes {len(takes.positional)} positional arguments"
            )
        place = takes.positional[number] if known else number
        rules[place] = _Rule(place if isinstance(place, str) else f"argument {number}", min_ndim)
    for argument, ndim in _named_ndims(kwargs, min_ndim):
        if not (takes.open_kwargs or argument in takes.keyword or argument in takes.positional):
            raise InputError(
                f"batch_kwargs has {argument!r}, but {name} takes {', '.join([*takes.positional, *takes.keyword])}"
            )
        rules[argument] = _Rule(argument, ndim)
    return rules


def _named_ndims(kwargs: Any, min_ndim: int | None) -> Iterable[tuple[str, int]]:
    if isinstance(kwargs, str):
        raise OptionTypeError(f"batch_kwargs is a mapping or a list of names, got the string {kwargs!r}")
    for name in kwargs or ():
        ndim = kwargs[name] if isinstance(kwargs, Mapping) else min_ndim
        if isinstance(ndim, bool) or not isinstance(ndim, int) or ndim < 1:
            raise OptionTypeError(
                f"batch_kwargs[{name!r}] is the number of dimensions with the batch, a positive int; got {ndim!r}"
            )
        yield name, ndim


def _arguments(names: list[str], args: list, kwargs: dict) -> Iterable[tuple[int | str, Any, Callable[[Any], None]]]:
    """(name or position, value, setter) of every argument of a call."""
    for i, value in enumerate(list(args)):
        yield names[i] if i < len(names) else i, value, functools.partial(args.__setitem__, i)
    for name, value in list(kwargs.items()):
        yield name, value, functools.partial(kwargs.__setitem__, name)


def _unsqueezed(fn: Callable, rule: _Rule, value: Any, touched: list[tuple[str, int, bool]]) -> Any:
    if not tensors_of(value):
        raise OptionTypeError(
            f"{_name(fn)}: {rule.label} gets a batch dimension, but {type(value).__name__} {value!r:.40} has no tensor"
        )

    def add(tensor: torch.Tensor) -> torch.Tensor:
        added = rule.below is None or tensor.dim() < rule.below
        touched.append((rule.label, 1 if added else tensor.shape[0], added))
        return tensor.unsqueeze(0) if added else tensor

    return map_tensors(add, value)


def _check_one_row(fn: Callable, touched: list[tuple[str, int, bool]]) -> None:
    """A batch of one is a shared argument; a batch of several beside a single row is a mistake."""
    for label, rows, added in touched:
        if not added and rows != 1:
            single = next(other for other, _, is_single in touched if is_single)
            raise InputError(
                f"{_name(fn)}: {single} is a single row, but {label} is a batch of {rows}; pass both with a batch "
                "dimension, or both without"
            )


def _squeezed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.squeeze(0) if tensor.dim() > 0 else tensor


class _Signature(NamedTuple):
    """Names that a function takes by position, names it takes by keyword alone, and whether either list is open."""

    positional: list[str]
    keyword: set[str]
    open_args: bool
    open_kwargs: bool


def _signature(fn: Callable) -> _Signature:
    try:
        parameters = inspect.signature(fn).parameters
    # a builtin may have none
    except ValueError:
        return _Signature([], set(), True, True)
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    kinds = {p.kind for p in parameters.values()}
    return _Signature(
        [name for name, p in parameters.items() if p.kind in by_place],
        {name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY},
        inspect.Parameter.VAR_POSITIONAL in kinds,
        inspect.Parameter.VAR_KEYWORD in kinds,
    )


def _name(fn: Callable) -> str:
    return getattr(fn, "__qualname__", None) or type(fn).__name__
