"""Pairs of autograd Functions that any nesting of vmap and grad folds into one launch.

The idea: a mapped dimension always becomes a new leading *group* dimension. Row tensors are (*groups, ..., C); shared
tensors (weights, tables) are (*groups, ...) in which a group dimension of 1 means "the same for all", so an unbatched
weight is never expanded and its gradient comes back per group. A launcher sees plain tensors and the number of group
dimensions, folds them to the canonical (G, R, C) / (1 | G, ...) and runs one kernel. Backward is a Function of its own:
under `torch.func.grad`, which always asks for a double-backward graph, it keeps nothing alive. Leaves out forward mode
and double backward: both raise.

    pair = function_pair("opake_rms_norm", forward=f, backward=b, roles=(ROWS, SHARED),
                         save_inputs=(0, 1), save_outputs=(1,), stats=1)
    y, rstd = pair(x, weight, groups, eps)             # tensors first, then `groups`, then hashable settings

    f(x, weight, groups, eps) -> output or (outputs..., stats...)
    b(grads, saved, need, groups, eps) -> one gradient or None for each tensor input

`grads` has one entry a differentiable output (None where nothing came back), `saved` the chosen inputs then the chosen
outputs, `need` one bool a tensor input. `groups` is 0 for an ordinary call, 1 when the caller gives a weight with a
leading example axis of its own (the batched engine), and one more inside each vmap. The gradient of a SHARED input has
all its group dimensions full; the pair sums it back to the shape of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import Function

from .dispatch import alive, eagerly, short_apply, transforms_active, values_readable
from .opaque import Outline, opaque

__all__ = [
    "ROWS",
    "SHARED",
    "fold_groups",
    "fold_rows",
    "fold_shared",
    "function_pair",
    "sum_to_shape",
    "transforms_active",
    "values_readable",
]

# how a tensor argument meets a mapped dimension that it does not have: expanded, or kept as a group of one
ROWS, SHARED = "rows", "shared"


def lead(tensor: Any, dim: int | None, size: int, role: str) -> Any:
    """The mapped dimension as the first one: moved, or added as `size` (ROWS, a view) or as 1 (SHARED)."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if dim is not None:
        return tensor.movedim(dim, 0)
    tensor = tensor.unsqueeze(0)
    return tensor if role is SHARED else tensor.expand(size, *tensor.shape[1:])


def fold_groups(x: torch.Tensor, groups: int) -> int:
    """G, the product of the first `groups` dimensions."""
    G = 1
    for size in x.shape[:groups]:
        G *= size
    return G


def fold_rows(x: torch.Tensor, groups: int) -> torch.Tensor:
    """(*groups, ..., C) -> (G, R, C); a view where the strides allow it."""
    G, C, R = fold_groups(x, groups), x.shape[-1], 1
    for size in x.shape[groups:-1]:
        R *= size
    return x.reshape(G, R, C)


def fold_shared(w: torch.Tensor, groups: int, like: torch.Tensor) -> torch.Tensor:
    """(*groups or ones, ...) -> (1 | G, ...), where `like` is a row tensor with all groups.

    Kept as (1, ...) when every group dimension is one; expanded only when some are and some are not (a weight mapped
    by one vmap of two).
    """
    tail, G = w.shape[groups:], fold_groups(w, groups)
    if G != 1 and w.shape[:groups] != like.shape[:groups]:
        G = fold_groups(like, groups)
        w = w.expand(*like.shape[:groups], *tail)
    return w.reshape(G, *tail)


def sum_to_shape(grad: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Sum the dimensions in which `shape` has one and `grad` more: groups that shared a weight add their gradients."""
    dims = [i for i, (have, want) in enumerate(zip(grad.shape, shape, strict=True)) if want == 1 and have != 1]
    return grad.sum(dims, keepdim=True) if dims else grad


def _pack(results: Sequence[torch.Tensor]) -> Any:
    # a lone tensor spares functorch a pytree at every level
    return results[0] if len(results) == 1 else tuple(results)


def function_pair(
    name: str,
    *,
    forward: Callable[..., Any],
    backward: Callable[..., Sequence[torch.Tensor | None]],
    roles: Sequence[str],
    save_inputs: Sequence[int] = (),
    save_outputs: Sequence[int] = (),
    outputs: int = 1,
    stats: int = 0,
    materialize: bool = False,
    save_for: Mapping[int, Sequence[int]] | None = None,
    outline: Outline | None = None,
) -> Callable[..., Any]:
    """The callable op `pair(*tensors, groups, *settings)` over two autograd Functions (protocol: module docstring).

    `roles`: ROWS or SHARED for each tensor argument (None is allowed as a value). `outputs`: differentiable outputs,
    first. `stats`: outputs after them that are not differentiable (lse, rstd): they must be outputs to be saved across
    transform levels. `materialize`: missing gradients arrive as zeros instead of None, for a backward that saves
    nothing from which their shape would follow. `save_for`: a saved input that is kept only if one of these inputs
    needs a gradient; else `saved` has None in its place. `outline`: shape and dtype of each result of forward for the
    same arguments, by which the op stays inside the graphs of `torch.compile` (opaque.py).
    """
    n_in = len(roles)
    saved_roles = [*[ROWS] * outputs, *[roles[i] for i in save_inputs], *[ROWS] * len(save_outputs)]
    n_back = len(saved_roles)
    users = save_for or {}
    shared = [i for i, role in enumerate(roles) if role is SHARED]
    unsupported = f"{name}: {{}} is not supported; use the op's plain twin for it"

    def save(inputs: Sequence[Any], out: Sequence[torch.Tensor], needs: Sequence[bool]) -> list[torch.Tensor | None]:
        kept = [inputs[i] for i in save_inputs]
        if users:
            wanted = [i not in users or any(needs[j] for j in users[i]) for i in save_inputs]
            kept = [t if here else None for t, here in zip(kept, wanted, strict=True)]
        return [*kept, *[out[i] for i in save_outputs]] if save_outputs else kept

    class Backward(Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            # args: gradients, saved tensors, bit mask of needed inputs, groups, settings
            mask, rest = args[n_back], args[n_back + 1 :]
            need = tuple(bool(mask >> i & 1) for i in range(n_in))
            results = backward(args[:outputs], args[outputs:n_back], need, *rest)
            found = [g for g, wanted in zip(results, need, strict=True) if wanted and g is not None]
            if len(found) < sum(need):
                raise RuntimeError(unsupported.format("the gradient of an argument that is taken as frozen"))
            return _pack(found)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise RuntimeError(unsupported.format("double backward"))

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            raise RuntimeError(unsupported.format("forward-mode differentiation (jvp)"))

        @staticmethod
        def vmap(info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
            tensors = [lead(t, d, info.batch_size, r) for t, d, r in zip(args, in_dims, saved_roles, strict=False)]
            mask, groups, *settings = args[n_back:]
            return apply_backward(*tensors, mask, groups + 1, *settings), 0

    class Forward(Function):
        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            out = output if isinstance(output, tuple) else (output,)
            if stats:
                ctx.mark_non_differentiable(*out[outputs:])
            ctx.set_materialize_grads(materialize)
            ctx.save_for_backward(*save(inputs, out, ctx.needs_input_grad))
            ctx.settings = inputs[n_in:]
            if shared:
                ctx.shapes = [None if inputs[i] is None else inputs[i].shape for i in shared]

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            need, settings = ctx.needs_input_grad[:n_in], ctx.settings
            none = (None,) * len(settings)
            if grads[0] is None and all(g is None for g in grads[:outputs]):
                return (None,) * n_in + none
            if torch.is_grad_enabled() or transforms_active():
                mask = sum(1 << i for i in range(n_in) if need[i])
                packed = eagerly(apply_backward, *grads[:outputs], *ctx.saved_tensors, mask, *settings)
                packed = iter(packed if isinstance(packed, tuple) else (packed,))
                found: Any = [next(packed) if wanted else None for wanted in need]
            else:
                # an ordinary backward records nothing: no Function needed
                given = alive((*grads[:outputs], *ctx.saved_tensors))
                found = eagerly(backward, given[:outputs], given[outputs:], need, *settings)
            if shared and settings[0]:
                # groups that shared a tensor add their gradients
                found = list(found)
                for i, shape in zip(shared, ctx.shapes, strict=True):
                    if need[i] and shape is not None and found[i] is not None:
                        found[i] = sum_to_shape(found[i], shape)
            return (*found, *none)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            raise RuntimeError(unsupported.format("forward-mode differentiation (jvp)"))

        @staticmethod
        def vmap(info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
            tensors = [lead(t, d, info.batch_size, r) for t, d, r in zip(args, in_dims, roles, strict=False)]
            groups, *settings = args[n_in:]
            return apply_forward(*tensors, groups + 1, *settings), 0

    # no frame of our own around it
    Forward.forward = staticmethod(forward)  # pyright: ignore[reportAttributeAccessIssue]
    Forward.__name__ = Forward.__qualname__ = name
    # the node that a graph shows for the op
    Forward._backward_cls.__name__ = f"{name}Backward"  # pyright: ignore[reportAttributeAccessIssue]
    Backward.__name__ = Backward.__qualname__ = f"{name}_backward"
    apply_forward, apply_backward = short_apply(Forward), short_apply(Backward)

    compiled = opaque(name, forward, backward, outline, n_in, outputs, save) if outline else None

    def pair(*args: Any) -> Any:
        if compiled is not None and torch.compiler.is_compiling() and not transforms_active():
            return compiled(*args)
        return eagerly(apply_forward, *args)

    return pair
