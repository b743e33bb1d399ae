"""What PEFT copied while a model was patched: `modules_to_save` copies a layer whole, and no undo knows the copy.

After everything else is taken back, whatever of ours a copy still holds becomes what the layer itself now has there.
Leaves out the parameters and all that somebody else put on the copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import TYPE_CHECKING, Any

from opake import hf

from .config import IMPLEMENTATIONS, OURS
from .instance import is_ours
from .undo import MISSING

if TYPE_CHECKING:
    from torch import nn

_PREFIX = "_opake"


def clean(model: nn.Module) -> None:
    """Take ours off every copy that a wrapper of PEFT's below `model` holds."""
    for original, copy in _pairs(model):
        for name, value in list(vars(copy).items()):
            there = vars(original).get(name, MISSING)
            if _left_over(name, value, there):
                _set(copy, original, name, there)


def _pairs(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    for wrapper in model.modules():
        original, copies = (wrapper._modules.get(name) for name in ("original_module", "modules_to_save"))
        if original is not None and copies is not None:
            known = dict(original.named_modules())
            for copy in copies.children():
                yield from ((known[name], each) for name, each in copy.named_modules() if name in known)


def _left_over(name: str, value: Any, there: Any) -> bool:
    if isinstance(value, MethodType):
        return is_ours(value.__func__)
    return (name.startswith(_PREFIX) and there is MISSING) or any(_selects_ours(each) for each in hf.configs(value))


def _selects_ours(config: Any) -> bool:
    return any(str(vars(config).get(key, "")).startswith(OURS) for key in IMPLEMENTATIONS)


def _set(copy: nn.Module, original: nn.Module, name: str, there: Any) -> None:
    if there is MISSING:
        del vars(copy)[name]
    elif isinstance(there, MethodType) and there.__self__ is original:
        vars(copy)[name] = MethodType(there.__func__, copy)
    else:
        vars(copy)[name] = there
