"""Mixture of experts as one op: each token through the experts that a router chose for it, weighted and added.

This file checks arguments, chooses a path and ties forward and backward into a pair that any nesting of vmap and grad
folds into one call: the tokens of all examples are sorted together, by expert and then by example. Leaves out routing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from opake_kernels.activations import Activation, activation_for
from opake_kernels.checks import (
    ExampleAxisError,
    check_float,
    check_index,
    check_same_device,
    check_same_dtype,
    check_shape,
)
from opake_kernels.fold import ROWS, SHARED, fold_rows, function_pair

from . import dense, passes
from .choice import choose
from .fused import Fused
from .grouped import Grouped
from .routing import packed, route, unpacked
from .weights import NAMES, Weights, gather

__all__ = ["opake_moe"]

_OP = "opake_moe"
Optional = torch.Tensor | None
Adapter = tuple[torch.Tensor, torch.Tensor, float] | None


class Settings(NamedTuple):
    """What a call keeps constant: the gate, whether its halves alternate, LoRA scalings, and the path."""

    act: Activation
    paired: bool
    scalings: tuple[float, float]
    path: str


def _folded(x: Any, index: Any, weight: Any, given: Sequence[Any], groups: int, s: Settings) -> Any:
    """x (G, T, H), index and weight (G, T, K), and the weights."""
    w = gather(given, s.scalings, groups, x)
    return fold_rows(x, groups), fold_rows(index, groups), fold_rows(weight, groups), w


def _path(index: torch.Tensor, w: Weights, s: Settings, order: torch.Tensor | None = None) -> Fused | Grouped:
    """`order`: as forward found it, where that was kept."""
    E = w.sizes[0]
    if not w.shared:
        # experts that differ between examples are experts of one example with more of them
        G = index.shape[0]
        index = index.long() + (torch.arange(G, device=index.device) * (E // G))[:, None, None]
        index = index.reshape(1, -1, index.shape[-1])
    kind = Fused if s.path == "fused" else Grouped
    by_example = s.path == "grouped" and index.device.type == "cpu"
    r = route(index, E, by_example) if order is None else unpacked(order, index, E)
    return kind(w, r, s.act, s.paired)


def _forward(x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    """(the result, gate and up of the sorted rows where they are kept, and their order)."""
    *given, groups, s = args
    x_GTH, index_GTK, weight_GTK, w = _folded(x, index, weight, given, groups, s)
    lead = x.shape[:groups]
    if not x.numel() or not index.numel():
        return torch.zeros_like(x), *_unkept(x, lead)
    if s.path == "dense":
        y = dense.forward(x_GTH, index_GTK, weight_GTK, w, s.act, s.paired)
        return y.view(x.shape), *_unkept(x, lead)
    rows, path = x_GTH.reshape(-1, x.shape[-1]).contiguous(), _path(index_GTK, w, s)
    y = passes.forward(rows, weight_GTK.reshape(-1), path).view(x.shape)
    if isinstance(path, Grouped) and path.r.by_example and path.kept is not None:
        # on a CPU the product costs more than the memory; its rows are sorted by example first
        order = packed(path.r, x_GTH.shape[0])
        return y, path.kept.view(*lead, -1, path.kept.shape[1]), order.view(*lead, -1)
    return y, *_unkept(x, lead)


def _unkept(x: torch.Tensor, lead: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Nothing, twice: an output must have the groups, also one that stands for nothing."""
    return x.new_empty(*lead, 0), x.new_empty(*lead, 0)


def _backward(grads: Any, saved: Any, need: Any, groups: int, s: Settings) -> list[Optional]:
    (d,), (x, index, weight, *given, kept, order) = grads, saved
    lead = d.shape[:groups]
    need = [need[0], *need[2:]]
    if not x.numel() or not index.numel():
        return _nothing(d, x, weight, given, need, lead, groups)
    x_GTH, index_GTK, weight_GTK, w = _folded(x.expand(d.shape), index, weight, given, groups, s)
    dtypes = [None if t is None else t.dtype for t in given]
    if s.path == "dense":
        d_GTH = fold_rows(d, groups)
        found = dense.backward(d_GTH, x_GTH, index_GTK, weight_GTK, w, s.act, s.paired, need, dtypes)
    else:
        found = _sparse_backward(d, x_GTH, index_GTK, weight_GTK, w, s, need, dtypes, kept, order)
    dx, dw, *rest = found
    dx = None if dx is None else dx.view(d.shape)
    dw = None if dw is None else dw.to(weight.dtype).view(weight.shape)
    return [dx, None, dw, *[g if g is None else g.view(*lead, -1, *g.shape[2:]) for g in rest]]


def _sparse_backward(
    d: torch.Tensor, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor, w: Weights, s: Settings,
    need: Sequence[bool], dtypes: Sequence[Any], kept: torch.Tensor, order: torch.Tensor,
) -> list[Optional]:  # fmt: skip
    G, H = x.shape[0], x.shape[-1]
    rows, d_rows = (t.reshape(-1, H).contiguous() for t in (x, d))
    path = _path(index, w, s, order.reshape(G, -1) if order.numel() else None)
    if isinstance(path, Grouped) and kept.numel():
        path.kept = kept.reshape(-1, kept.shape[-1])
    dx, dw, *rest = passes.backward(d_rows, rows, weight.reshape(-1), path, need, dtypes)
    if dw is not None and w.down_bias is not None:
        flat = path.r.index.reshape(-1, index.shape[-1])
        dw = dw + passes.routing_gradient_of_bias(d_rows, w.down_bias, flat).reshape(-1)
    return [dx, dw, *[g if g is None else g.reshape(G, -1, *g.shape[2:]) for g in rest]]


def _nothing(
    d: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, given: Sequence[Optional], need: Sequence[bool],
    lead: Sequence[int], groups: int,
) -> list[Optional]:  # fmt: skip
    """Gradients of a call without tokens."""
    asked = zip(given, need[2:], strict=True)
    zeros = [t.new_zeros(*lead, *t.shape[groups:]) if n and t is not None else None for t, n in asked]
    return [torch.zeros_like(d) if need[0] else None, None, torch.zeros_like(weight) if need[1] else None, *zeros]


_moe = function_pair(
    _OP,
    forward=_forward,
    backward=_backward,
    roles=(ROWS, ROWS, ROWS, *[SHARED] * len(NAMES)),
    save_inputs=tuple(range(3 + len(NAMES))),
    save_outputs=(1, 2),
    stats=2,
)


def opake_moe(
    x: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    activation: str | Activation = "silu",
    grouped: bool = True,
    gate_up_bias: Optional = None,
    down_bias: Optional = None,
    interleaved: bool = False,
    transposed: bool = False,
    lora_gate_up: Adapter = None,
    lora_down: Adapter = None,
) -> torch.Tensor:
    """sum_k top_k_weights[k] * expert[top_k_index[k]](x), an expert being down(act(gate(x)) * up(x)).

    x: (..., H) floating; gate_up_proj: (E, 2I, H), gate first, or rows of gate and up in turn with `interleaved`;
    down_proj: (E, H, I), both of the dtype of x; with `transposed` (E, H, 2I) and (E, I, H). top_k_index: (..., K)
    int64 or int32, entries 0 .. E - 1; top_k_weights: (..., K) of any floating dtype. gate_up_bias: (E, 2I), down_bias:
    (E, H). `activation`: a `hidden_act` name or an `Activation`. lora_gate_up, lora_down: (A, B, scaling) with A
    (E, in, r) and B (E, r, out) of any floating dtype; the product of the two is never formed. Any of these weights may
    have an example axis (B, E, ...) of its own; x is then (B, ..., H). Returns (..., H) in the dtype of x.

    grouped=False takes the dense path; else shapes, dtypes and hardware choose (`moe.choose`). Gradients go to x, to
    the routing weights and, where asked for, to the weights, for each example under vmap: those of a stack are then as
    large as the stack, for each example. A repeated call gives the same bits, an example its own whatever the others.

    Raises TypeError (dtype), ValueError (shape, device, unknown activation). Double backward and forward mode raise
    RuntimeError. Sources: Shazeer et al., "Outrageously Large Neural Networks" (2017), Gale et al., "MegaBlocks"
    (2023).
    """
    act = activation_for(activation)
    if transposed:
        gate_up_proj, down_proj = gate_up_proj.mT, down_proj.mT
    A, B, s_up = lora_gate_up or (None, None, 1.0)
    A_down, B_down, s_down = lora_down or (None, None, 1.0)
    weights = (gate_up_proj, down_proj, gate_up_bias, down_bias, A, B, A_down, B_down)
    groups = _checked(x, weights, top_k_index, top_k_weights)
    E, H, I = down_proj.shape[-3:]
    path = choose(x.device, x.dtype, E, top_k_index.shape[-1], I, H, grouped=grouped).path
    settings = Settings(act, interleaved, (float(s_up), float(s_down)), path)
    sized = zip(weights, _DIMS, strict=True)
    with_axis = [w if w is None or not groups or w.dim() == dim + 1 else w[None] for w, dim in sized]
    return _moe(x, top_k_index, top_k_weights, *with_axis, groups, settings)[0]


_DIMS = (3, 3, 2, 2, 3, 3, 3, 3)


def _checked(x: Any, weights: Sequence[Any], index: Any, routing: Any) -> int:
    """Everything that can be wrong with shapes, dtypes and devices; returns the number of group dimensions."""
    named: dict[str, Any] = {name: w for name, w in zip(NAMES, weights, strict=True) if w is not None}
    check_float(_OP, x=x, top_k_weights=routing, **named)
    check_index(_OP, top_k_index=index)
    check_same_device(_OP, x=x, top_k_index=index, top_k_weights=routing, **named)
    check_same_dtype(_OP, x=x, **{name: w for name, w in named.items() if name[0] not in "AB"})
    dims: dict[str, int] = dict(zip(NAMES, _DIMS, strict=True))
    for name, w in named.items():
        if w.dim() not in (dims[name], dims[name] + 1):
            raise ValueError(f"{_OP}: {name} has shape {tuple(w.shape)}, expected {dims[name]} dimensions, or one more")
    groups = int(any(w.dim() > dims[name] for name, w in named.items()))
    down = named["down"]
    E, H, I = down.shape[-3:]
    ranks = {name: named[name].shape[-1] for name in ("A", "A_down") if name in named}
    shapes = {
        "gate_up": (E, 2 * I, H),
        "down": (E, H, I),
        "gate_up_bias": (E, 2 * I),
        "down_bias": (E, H),
        "A": (E, H, ranks.get("A")),
        "B": (E, ranks.get("A"), 2 * I),
        "A_down": (E, I, ranks.get("A_down")),
        "B_down": (E, ranks.get("A_down"), H),
    }
    for name, w in named.items():
        check_shape(_OP, name, w.shape[-dims[name] :], shapes[name], f"E {E}, I {I}, H {H} as in down_proj")
        if w.dim() > dims[name] and w.shape[:1] != x.shape[:1]:
            raise ExampleAxisError(
                f"{_OP}: {name} has shape {tuple(w.shape)}, so its first dimension is an example axis, but x has shape "
                f"{tuple(x.shape)}"
            )
    check_shape(_OP, "x", x.shape[-1:], (H,), "H of down_proj")
    check_shape(_OP, "top_k_index", index.shape[:-1], x.shape[:-1], "the leading dimensions of x")
    check_shape(_OP, "top_k_weights", routing.shape, index.shape, "the shape of top_k_index")
    if groups and x.dim() < 2:
        raise ExampleAxisError(f"{_OP}: weights have an example axis, so x is (B, ..., H); got {tuple(x.shape)}")
    return groups
