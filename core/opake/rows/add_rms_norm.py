"""`AddRMSNorm` in place: the layer's own forward runs, and its residual sum ends in the fused op.

Only the output of the module that is added is wrapped; the sum is recognised by the patched norm (see `lazy_sum`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from opake.patching.instance import wrap_method
from opake.patching.undo import Skip, Undo

from .lazy_sum import Pending
from .rms_norm import variant_of

if TYPE_CHECKING:
    from opake.records import AddRMSNorm


def fits(record: AddRMSNorm, module: nn.Module) -> Skip | None:
    for name in (record.addend, record.norm):
        if not isinstance(getattr(module, name, None), nn.Module):
            return Skip(f"{type(module).__name__} has no submodule {name!r}")
    if variant_of(getattr(module, record.norm)) is None:
        return Skip(f"{record.norm} of {type(module).__name__} is no RMSNorm of a known variant")
    return None


def apply(record: AddRMSNorm, module: nn.Module) -> Undo:
    addend = getattr(module, record.addend)
    return Undo([wrap_method(addend, "forward", _forward, where=f"{record.addend}.forward")])


def _forward(inner: Callable[..., Any], self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    out = inner(self, *args, **kwargs)
    # a compiler traces plain tensors only, and fuses the sum by itself
    if torch.compiler.is_compiling():
        return out
    if isinstance(out, torch.Tensor):
        return Pending(out)
    if isinstance(out, tuple) and out and isinstance(out[0], torch.Tensor):
        return (Pending(out[0]), *out[1:])
    return out
