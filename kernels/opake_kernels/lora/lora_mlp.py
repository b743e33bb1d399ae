"""A gated MLP with LoRA on its three projections in one call: down(act(gate(x)) * up(x)).

Kept for backward: x, the adapters by reference, gate and up, and the low-rank rows; the activation is computed again.
The backward of a large call goes through the rows in parts, so that less than two more tensors of the size of gate are
alive; with `rematerialise` gate and up are not kept, and made again part by part. Leaves out biases and dropout.
Sources: Shazeer, "GLU Variants Improve Transformer" (2020); Hu et al., "LoRA" (2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from opake_kernels.activations import Activation, activation_for
from opake_kernels.fold import ROWS, SHARED, function_pair
from opake_kernels.launch import uses_triton

from . import projections
from .arguments import check_precision, check_projections, frozen, leading_axis, takes_twin, with_axis
from .gate import activated, activated_backward
from .gate_launch import MAX_RANK, gate_backward, gate_forward
from .lora_w import lora_w_reference
from .products import cast, group_product, matmul
from .projections import Projections, gather
from .rows import flat_rows, group_count, like_groups, shares, together, trace, unflat_rows

__all__ = ["lora_mlp_reference", "opake_lora_mlp"]

Weight = torch.Tensor | None
# most parts of the backward, and the multiply-adds of a product in one: with fewer its launches cost more than it saves
PARTS, PART = 3, 2**36


def lora_mlp_reference(
    X: torch.Tensor,
    Wg: torch.Tensor,
    Ag: Weight,
    Bg: Weight,
    Sg: float,
    Wu: torch.Tensor,
    Au: Weight,
    Bu: Weight,
    Su: float,
    Wd: torch.Tensor,
    Ad: Weight,
    Bd: Weight,
    Sd: float,
    activation: str | Activation = "silu",
    *,
    lora_precision: str = "compute",
) -> torch.Tensor:
    """The plain twin of `opake_lora_mlp`."""
    gate = lora_w_reference(X, Wg, Ag, Bg, Sg, lora_precision=lora_precision)
    up = lora_w_reference(X, Wu, Au, Bu, Su, lora_precision=lora_precision)
    hidden = activation_for(activation).reference(gate, up)
    return lora_w_reference(hidden, Wd, Ad, Bd, Sd, lora_precision=lora_precision)


def _forward(x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    """args: W, A, B of gate, up and down, then groups, scalings, act, fused -> y, a trace, Z, Z of down, gate, up.

    Where it is fused, gate and up are without their low-rank terms, which are added again wherever they are read.
    """
    *weights, groups, scalings, act, fused = args
    inner, outer = _gathered(weights[0::3], weights[1::3], weights[2::3], scalings, groups, x)
    rows = flat_rows(x)
    Z = projections.low_rank_rows(rows, inner)
    gate, up = _gate_and_up(rows, Z, inner, fused)
    h = gate_forward(gate, up, Z, inner.B, group_count(x, groups), act) if fused else activated(gate, up, act)
    (y,), Zd = projections.forward(h, outer, (None,))
    lead = x.shape[:-1]
    kept = [t.view(*lead, t.shape[1]) for t in (Z, Zd, gate, up)]
    return unflat_rows(y, lead), trace(x, groups), *kept


def _gate_and_up(x: torch.Tensor, Z: torch.Tensor, inner: Projections, fused: bool) -> list[torch.Tensor]:
    return [matmul(x, W.mT) for W in inner.W] if fused else projections.outputs(x, Z, inner, (None, None))


def _gathered(
    W: Sequence[Any], A: Sequence[Any], B: Sequence[Any], scalings: tuple[float, ...], groups: int, like: torch.Tensor
) -> tuple[Projections, Projections]:
    """The projections of the input, and the down projection."""
    return (
        gather(W[:2], A[:2], B[:2], scalings[:2], groups, like),
        gather(W[2:], A[2:], B[2:], scalings[2:], groups, like),
    )


def _backward(
    grads: Sequence[Weight],
    saved: Sequence[Any],
    need: Sequence[bool],
    groups: int,
    scalings: tuple[float, ...],
    act: Activation,
    fused: bool,
) -> list[Weight]:
    given = grads[0]
    assert given is not None, "the trace has no gradient"
    x, *rest = saved
    inner, outer = _gathered(rest[0:3], rest[3:6], rest[6:9], scalings, groups, given)
    lead, G = given.shape[:-1], group_count(given, groups)
    # gate and up stand last; x takes their place where they were not kept
    d, Z, Zd, *both = [flat_rows(t) for t in (given, *rest[10:])]
    # where they are made again a part holds four such tensors, not two
    size = PART if both else PART // 2
    both = both or [flat_rows(x)]
    need_a, need_b = need[2::3], need[3::3]
    K = d.new_empty(d.shape[0], inner.A.shape[-1]) if need[0] or any(need_a[:2]) else None
    dX = d.new_empty(d.shape[0], inner.W[0].shape[-1]) if need[0] else None
    sums: list[list[Weight]] = []
    if need[0] or any((*need_a, *need_b[:2])):
        for first, last, g in _parts(d, G, size, inner, outer):
            part = [None if t is None else t[first:last] for t in (d, Z, K, dX)]
            sums.append(_part(part, [t[first:last] for t in both], g, inner, outer, act, fused))
    dBg, dBu, dAd = together(sums, G) if sums else (None, None, None)
    dA = [*projections.factor_gradients(K, None if x is None else flat_rows(x), inner, G, need_a[:2]), dAd]
    dB = [dBg, dBu, group_product(d, Zd, G, outer.dtypes[0][1]).mT if need_b[2] else None]
    out: list[Weight] = [None if dX is None else dX.view(*lead, dX.shape[1])]
    for a, b, wants_a, wants_b in zip(dA, dB, need_a, need_b, strict=True):
        out += [None, like_groups(a, lead[:groups]) if wants_a else None]
        out += [like_groups(b, lead[:groups]) if wants_b else None]
    return out


def _parts(d: torch.Tensor, G: int, size: int, inner: Projections, outer: Projections) -> list[tuple[int, int, int]]:
    """`shares` of the rows with products of `size` or more; weights that differ between groups are not split."""
    (N, hidden), wide = d.shape, inner.W[0].shape[-2]
    count = min(N * hidden * wide // size, PARTS) if inner.shared() and outer.shared() else 1
    return shares(N, G, count)


def _part(
    rows: Sequence[Any],
    both: Sequence[torch.Tensor],
    G: int,
    inner: Projections,
    outer: Projections,
    act: Activation,
    fused: bool,
) -> list[Weight]:
    """One part of the rows: fills K and dX, returns dBg, dBu, dAd (G, ...) of its groups.

    both: gate and up, or the input alone, from which they are computed again.
    """
    d, Z, K, dX = rows
    gate, up = both if len(both) == 2 else _gate_and_up(both[0], Z, inner, fused)
    Kd = projections.low_rank_gradients([d], outer)
    if fused:
        dg = matmul(d, outer.W[0])
        down = outer.A.mT if outer.B[0] is not None else None
        du, sums = gate_backward(dg, gate, up, Z, Kd, [*inner.B, down], G, act)
        sums = [s if s is None else s.mT for s in sums[:2]] + [sums[2]]
    else:
        dh = projections.input_gradient([d], Kd, outer)
        H, dg, du = activated_backward(dh, gate, up, act)
        sums = [
            None if B is None else group_product(e, Z[:, inner.columns[j]], G, inner.dtypes[j][1]).mT
            for j, (e, B) in enumerate(zip((dg, du), inner.B, strict=True))
        ]
        sums.append(None if outer.B[0] is None else group_product(Kd, H, G, outer.dtypes[0][0]).mT)
    if K is not None:
        projections.low_rank_gradients((dg, du), inner, K)
        if dX is not None:
            projections.input_gradient((dg, du), K, inner, dX)
    dtypes = inner.dtypes[0][1], inner.dtypes[1][1], outer.dtypes[0][0]
    return [None if s is None else cast(s, dtype) for s, dtype in zip(sums, dtypes, strict=True)]


_W, _A, _B = (1, 4, 7), (2, 5, 8), (3, 6, 9)
_lora_mlp = function_pair(
    "opake_lora_mlp",
    forward=_forward,
    backward=_backward,
    roles=(ROWS, *[SHARED] * 9),
    save_inputs=(0, *_W, *_A, *_B),
    save_outputs=(1, 2, 3, 4, 5),
    outputs=2,
    stats=4,
    # x is there for the gradients of the two inner A
    save_for={0: _A[:2]},
)
_lora_mlp_rematerialised = function_pair(
    "opake_lora_mlp_rematerialised",
    forward=lambda *args: _forward(*args)[:-2],  # without gate and up
    backward=_backward,
    roles=(ROWS, *[SHARED] * 9),
    save_inputs=(0, *_W, *_A, *_B),
    save_outputs=(1, 2, 3),
    outputs=2,
    stats=2,
)


def opake_lora_mlp(
    X: torch.Tensor,
    Wg: torch.Tensor,
    Ag: Weight,
    Bg: Weight,
    Sg: float,
    Wu: torch.Tensor,
    Au: Weight,
    Bu: Weight,
    Su: float,
    Wd: torch.Tensor,
    Ad: Weight,
    Bd: Weight,
    Sd: float,
    activation: str | Activation = "silu",
    *,
    lora_precision: str = "compute",
    rematerialise: bool = False,
) -> torch.Tensor:
    """down(act(gate(X)) * up(X)), each projection X W^T + (X A) B * S.

    X: (..., hidden); Wg, Wu: (intermediate, hidden); Wd: (hidden, intermediate); A: (in, rank); B: (rank, out), or both
    None for a projection without an adapter. `activation`: a `hidden_act` name or an `Activation`. Dtypes, the leading
    example axis of adapters, `lora_precision` and errors are as in `opake_lora_w`. Returns (..., hidden).

    rematerialise: keep X for the backward, and not gate and up, which cost their two products again. For frozen base
    weights and `lora_precision="compute"`, else ValueError; `torch.compile` decides for itself what it keeps.
    """
    op, act = "opake_lora_mlp", activation_for(activation)
    given = [("g", Wg, Ag, Bg, None), ("u", Wu, Au, Bu, None), ("d", Wd, Ad, Bd, None)]
    check_precision(op, lora_precision)
    if Wg.shape != Wu.shape:
        raise ValueError(f"{op}: Wg and Wu must have one shape, got {tuple(Wg.shape)} and {tuple(Wu.shape)}")
    X = check_projections(op, X, given)
    if rematerialise and (lora_precision == "param" or not frozen(given)):
        raise ValueError(
            f"{op}: rematerialise is for frozen base weights and lora_precision='compute', got {lora_precision!r} and "
            f"requires_grad {[not frozen([each]) for each in given]}; use torch.utils.checkpoint around the call"
        )
    if takes_twin(given, lora_precision):
        return lora_mlp_reference(X, Wg, Ag, Bg, Sg, Wu, Au, Bu, Su, Wd, Ad, Bd, Sd, act, lora_precision=lora_precision)
    groups = leading_axis(given)
    weights = [tensor for each in given for tensor in with_axis(groups, each)[:3]]
    ranks = [A.shape[-1] for _, _, A, _, _ in given if A is not None]
    fused = uses_triton(X) and max(ranks, default=0) <= MAX_RANK
    run = _lora_mlp_rematerialised if rematerialise else _lora_mlp
    return run(X, *weights, groups, (float(Sg), float(Su), float(Sd)), act, fused)[0]
