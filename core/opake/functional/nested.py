"""Map a function over the tensors of a nested value: tuples, named tuples, lists and mappings, ModelOutput included.

Unlike a pytree it leaves everything that it does not know, such as a KV cache, as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with `fn` applied to every tensor in it; containers keep their type, other objects are handed through."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, Mapping):
        return _like_mapping(value, {key: map_tensors(fn, held) for key, held in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(fn, held) for held in value))
    if type(value) in (tuple, list):
        return type(value)(map_tensors(fn, held) for held in value)
    return value


def _like_mapping(old: Mapping, new: dict) -> Any:
    if type(old) is dict:
        return new
    # an output class of Transformers is a dataclass that is built from keywords
    if hasattr(old, "__dataclass_fields__"):
        return type(old)(**new)
    try:
        return type(old)(new)  # type: ignore[call-arg]
    except TypeError:
        return new


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in `value`, in order."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, value)
    return found
