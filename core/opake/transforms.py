"""Whether the code at hand runs inside a functorch transform (`vmap`, `grad`, `vjp`, ...).

This is the one question the compat layer may ask about its surroundings. It is answered from the interpreter stack
alone, never from the contents of a tensor, and costs well under a microsecond. What kind of transform is active, and
how deep, is nobody's business here.
"""

# the question is about torch itself, so torch is this file's job
# ruff: noqa: TID253
from __future__ import annotations

from collections.abc import Callable

import torch
import torch._C._functorch as _functorch


def _stack_probe() -> Callable[[], object]:
    """The cheapest call that answers None (or an empty list) when no transform is active."""
    for name in ("peek_interpreter_stack", "get_interpreter_stack"):
        probe = getattr(_functorch, name, None)
        if probe is not None:
            return probe
    raise ImportError(
        f"torch {torch.__version__} has neither peek_interpreter_stack nor get_interpreter_stack in "
        "torch._C._functorch, so opake cannot tell whether a transform is active; use torch >= 2.11"
    )


_probe = _stack_probe()


def inside_transform() -> bool:
    """True inside any `torch.func` transform (`vmap`, `grad`, `vjp`, `jvp`, `functionalize`), else False.

    Inside the body of a `torch.autograd.Function` whose `vmap` rule handed it a folded tensor, the transform that was
    folded away no longer counts: the answer is about the tensors at hand.
    """
    # torch.compile folds this question into a constant, while it traces a transform as well; it cannot trace the other
    if torch.compiler.is_compiling():
        return torch._C._are_functorch_transforms_active()
    return bool(_probe())


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether a transform has wrapped this tensor, so that its values cannot be read."""
    return _functorch.is_functorch_wrapped_tensor(tensor)
