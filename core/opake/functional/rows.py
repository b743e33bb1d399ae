"""The rows of a call: arguments with a row dimension, checked, sliced into microbatches, taken apart for `vmap`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from opake.errors import InputError, OptionTypeError


@dataclass(frozen=True)
class Rows:
    """Flat leaves of the row arguments, each with its row dimension (None: shared by all rows), and their number."""

    leaves: list[Any]
    dims: list[int | None]
    spec: TreeSpec
    count: int

    @classmethod
    def of(cls, args: tuple, kwargs: Mapping[str, Any], in_dims: Any = None) -> Rows:
        """Check and flatten the arguments of a call.

        in_dims: None, or an int or None for every argument, a tuple with one entry for each positional argument
        (a first None for the parameters may stand before them), or a mapping for arguments by name. An entry is an int,
        None for a shared argument, or a structure like the argument's. Arguments without an entry have dimension 0.
        """
        paths, spec = tree_flatten_with_path((args, dict(kwargs)))
        dims = _flat_dims(args, kwargs, in_dims)
        labels = [_label(path) for path, _ in paths]
        leaves = [leaf for _, leaf in paths]
        checked = [_checked_dim(*item) for item in zip(labels, leaves, dims, strict=True)]
        return cls(leaves, checked, spec, _count(labels, leaves, checked))

    def rebuild(self, leaves: list[Any]) -> tuple[tuple, dict[str, Any]]:
        """(args, kwargs) with these leaves in place."""
        return tree_unflatten(leaves, self.spec)

    def leading(self) -> tuple[tuple, dict[str, Any]]:
        """(args, kwargs) as one batch: every row dimension in front, and shared tensors repeated for each row."""
        return self.rebuild([self._leading(x, d) for x, d in zip(self.leaves, self.dims, strict=True)])

    def _leading(self, leaf: Any, dim: int | None) -> Any:
        if dim is not None:
            return leaf.movedim(dim, 0)
        return leaf.expand(self.count, *leaf.shape) if isinstance(leaf, torch.Tensor) else leaf

    def microbatches(self, size: int | None) -> Iterator[tuple[slice, Rows]]:
        """Consecutive pieces of at most `size` rows, with their place; the last may be smaller."""
        step = max(1, self.count) if size is None else size
        for start in range(0, self.count, step):
            length = min(step, self.count - start)
            if length == self.count:
                yield slice(0, length), self
                return
            pieces = [
                x if d is None else x.narrow(d, start, length) for x, d in zip(self.leaves, self.dims, strict=True)
            ]
            yield slice(start, start + length), replace(self, leaves=pieces, count=length)


def check_microbatch_size(size: int | None) -> None:
    if size is None:
        return
    if isinstance(size, bool) or not isinstance(size, int):
        raise OptionTypeError(f"microbatch_size is an int or None, got {size!r} ({type(size).__name__})")
    if size < 1:
        raise InputError(f"microbatch_size is at least 1, got {size}")


def _label(path: tuple) -> str:
    """How a leaf is called in messages: `input_ids`, `row argument 0['mask']`."""
    _, argument, *rest = path
    name = getattr(argument, "key", None)
    return (name if isinstance(name, str) else f"row argument {argument.idx}") + keystr(tuple(rest))


def _checked_dim(label: str, leaf: Any, dim: int | None) -> int | None:
    if dim is None or not isinstance(leaf, torch.Tensor):
        return None
    if not -leaf.dim() <= dim < leaf.dim():
        raise InputError(
            f"{label} has shape {tuple(leaf.shape)}, so it has no row dimension {dim}; if all rows share it, "
            "give it None in in_dims"
        )
    return dim % leaf.dim()


def _count(labels: list[str], leaves: list[Any], dims: list[int | None]) -> int:
    sizes = [(label, x.shape[d]) for label, x, d in zip(labels, leaves, dims, strict=True) if d is not None]
    if not sizes:
        raise InputError(f"no tensor with a row dimension among the rows: {', '.join(labels) or 'none were passed'}")
    first, count = sizes[0]
    for label, size in sizes[1:]:
        if size != count:
            raise InputError(f"{first} has {count} rows, but {label} has {size}; they must agree")
    return count


def _flat_dims(args: tuple, kwargs: Mapping[str, Any], in_dims: Any) -> list[int | None]:
    by_place: list[Any] = [0] * len(args)
    by_name: dict[str, Any] = dict.fromkeys(kwargs, 0)
    if isinstance(in_dims, Mapping):
        unknown = sorted(in_dims.keys() - kwargs.keys())
        if unknown:
            raise InputError(
                f"in_dims names {', '.join(unknown)}, but the rows are {', '.join(kwargs) or 'positional'}"
            )
        by_name.update(in_dims)
    elif isinstance(in_dims, (tuple, list)):
        by_place = _by_place(args, in_dims)
    elif in_dims is not None:
        by_place, by_name = [in_dims] * len(args), dict.fromkeys(kwargs, in_dims)
    pairs = [*zip(args, by_place, strict=True), *((kwargs[name], by_name[name]) for name in kwargs)]
    return [dim for value, entry in pairs for dim in _entry_dims(value, entry)]


def _by_place(args: tuple, in_dims: tuple | list) -> list[Any]:
    if len(in_dims) == len(args) + 1 and in_dims[0] is None:
        return list(in_dims[1:])
    if len(in_dims) != len(args):
        raise InputError(f"in_dims has {len(in_dims)} entries for {len(args)} positional rows; it has one for each")
    return list(in_dims)


def _entry_dims(value: Any, entry: Any) -> list[int | None]:
    if entry is None or (isinstance(entry, int) and not isinstance(entry, bool)):
        return [entry for _ in tree_flatten(value)[0]]
    dims, spec = tree_flatten(entry)
    if spec != tree_flatten(value)[1]:
        raise InputError(f"in_dims entry {entry!r} is no int, no None, and not of the row argument's structure")
    if any(not (dim is None or type(dim) is int) for dim in dims):
        raise OptionTypeError(f"in_dims holds ints and None, got {entry!r}")
    return dims
