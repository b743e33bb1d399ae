"""Transformers warns about padding without a mask after reading token ids; inside a transform they cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from opake.patching.instance import wrap_method
from opake.patching.undo import Undo
from opake.transforms import inside_transform

NAME = "warn_if_padding_and_no_attention_mask"


def has_check(module: nn.Module) -> bool:
    return hasattr(type(module), NAME)


def apply(module: nn.Module) -> Undo:
    return Undo([wrap_method(module, NAME, _quiet)])


def _quiet(inner: Callable[..., Any], self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return None if inside_transform() else inner(self, *args, **kwargs)
