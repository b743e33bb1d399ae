"""Whether anyone may ask for the gradient of a tensor: autograd itself, or a transform at any level around the call.

A Function's forward is not told (its context comes later), and a loss that computes its gradient in forward has to
know. The answer is only an upper bound, and it never depends on values. Where torch has no such probe it is yes.
"""

from __future__ import annotations

import torch
import torch._C._functorch as _functorch

__all__ = ["tracked", "trained"]

_is_wrapped = getattr(_functorch, "is_functorch_wrapped_tensor", None)
_unwrapped = getattr(_functorch, "get_unwrapped", None)


def tracked(tensor: torch.Tensor | None) -> bool:
    """False only if no gradient of `tensor` can be asked for; None has none."""
    if tensor is None or not torch.is_grad_enabled():
        return False
    if torch.compiler.is_compiling():
        # the compiler knows no wrappers
        return tensor.requires_grad
    if _is_wrapped is None or _unwrapped is None:
        return True
    # each wrapper knows its own level alone
    at: torch.Tensor = tensor
    while _is_wrapped(at):
        if at.requires_grad:
            return True
        at = _unwrapped(at)
    return at.requires_grad


def trained(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no frozen one: it requires a gradient, even while autograd is off, or is `tracked`."""
    return tensor.requires_grad or tracked(tensor)
