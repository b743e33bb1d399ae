"""Rotary position embedding of queries and keys in one launch, in every layout found in decoders.

Half-split (Llama) or interleaved pairs (Cohere, GLM 4, DeepSeek), the whole head or a leading or trailing slice of
it, tables of the rotary width or of half of it, shared by all rows or one for each. The rotation is computed in fp32
and rounded once; its backward is the transposed rotation, so nothing but the tables is saved. Results never overwrite
q or k. Leaves out making the tables, and
gradients for them: a table that requires grad raises.
"""

from __future__ import annotations

from typing import Any

import torch

from .checks import check_float, check_same_device, check_same_dtype
from .fold import ROWS, SHARED, function_pair
from .launch import uses_triton
from .rope_launch import Layout, rotate
from .tracked import tracked

__all__ = ["opake_rope", "opake_rope_qk", "rope_qk_reference", "rope_reference"]


def rope_reference(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    trailing: bool = False,
    rotary_dim: int | None = None,
) -> torch.Tensor:
    """Plain PyTorch twin of `opake_rope`: same arguments, any device, differentiable to any order."""
    D, width = x.shape[-1], _rotary_width(x.shape[-1], cos.shape[-1], rotary_dim)
    compute = torch.promote_types(x.dtype, torch.float32)
    tables = []
    for table in (cos.to(compute), sin.to(compute)):
        if table.shape[-1] != width:
            table = table.repeat_interleave(2, dim=-1) if interleaved else torch.cat((table, table), dim=-1)
        tables.append(table.unsqueeze(-3))
    start = D - width if trailing else 0
    turned = x[..., start : start + width].to(compute)
    if interleaved:
        quarter = torch.stack((-turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
    else:
        quarter = torch.cat((-turned[..., width // 2 :], turned[..., : width // 2]), dim=-1)
    turned = (turned * tables[0] + quarter * tables[1]).to(x.dtype)
    return torch.cat((x[..., :start], turned, x[..., start + width :]), dim=-1)


def rope_qk_reference(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain PyTorch twin of `opake_rope_qk`."""
    return rope_reference(q, cos, sin, **options), rope_reference(k, cos, sin, **options)


def _rotary_width(D: int, R: int, rotary_dim: int | None) -> int:
    """How many of D columns turn, for tables of R columns: `rotary_dim`, else D for R = D and R = D / 2, else R."""
    if rotary_dim is not None:
        return rotary_dim
    return D if D in (R, 2 * R) else R


def _refuse_table_gradients(needed: bool) -> None:
    if needed:
        raise RuntimeError("opake_rope: cos and sin get no gradient here; detach them, or use rope_reference")


def _backward_qk(grads, saved, need, groups, layout):
    _refuse_table_gradients(need[2] or need[3])
    cos, sin = saved
    if need[0] and need[1]:
        return [*rotate(grads[0], grads[1], cos, sin, groups, layout, True), None, None]
    at = 0 if need[0] else 1
    alone = Layout(layout.width, layout.interleaved, layout.trailing, (layout.q_by_token, layout.k_by_token)[at], False)
    turned, _ = rotate(grads[at], None, cos, sin, groups, alone, True)
    return [turned, None, None, None] if at == 0 else [None, turned, None, None]


def _backward_one(grads, saved, need, groups, layout):
    _refuse_table_gradients(need[1] or need[2])
    cos, sin = saved
    return [rotate(grads[0], None, cos, sin, groups, layout, True)[0], None, None]


_PAIR_QK = function_pair(
    "opake_rope_qk",
    forward=lambda q, k, cos, sin, groups, layout: rotate(q, k, cos, sin, groups, layout, False),
    backward=_backward_qk,
    roles=(ROWS, ROWS, SHARED, SHARED),
    save_inputs=(2, 3),
    outputs=2,
    materialize=True,
    outline=lambda q, k, cos, sin, groups, layout: [(q.shape, q.dtype), (k.shape, k.dtype)],
)
_PAIR_ONE = function_pair(
    "opake_rope",
    forward=lambda x, cos, sin, groups, layout: rotate(x, None, cos, sin, groups, layout, False)[0],
    backward=_backward_one,
    roles=(ROWS, SHARED, SHARED),
    save_inputs=(1, 2),
    outline=lambda x, cos, sin, groups, layout: [(x.shape, x.dtype)],
)


def _check_tables(op: str, x: torch.Tensor, cos: Any, sin: Any, rotary_dim: int | None) -> int:
    """Raise unless cos and sin fit x (B, N, T, D); the rotary width."""
    check_float(op, cos=cos, sin=sin)
    check_same_device(op, x=x, cos=cos, sin=sin)
    B, _, T, D = x.shape
    if cos.shape != sin.shape:
        raise ValueError(f"{op}: cos and sin must have one shape, got {tuple(cos.shape)} and {tuple(sin.shape)}")
    if cos.dim() not in (2, 3) or cos.shape[-2] != T or (cos.dim() == 3 and cos.shape[0] not in (1, B)):
        raise ValueError(
            f"{op}: cos and sin have shape {tuple(cos.shape)}, expected ({T}, R), (1, {T}, R) or ({B}, {T}, R) "
            f"beside x of shape {tuple(x.shape)}"
        )
    R = cos.shape[-1]
    if isinstance(rotary_dim, float):
        raise TypeError(f"{op}: rotary_dim is {rotary_dim!r}, expected a whole number or None")
    width = _rotary_width(D, R, rotary_dim)
    if R not in (width, width // 2) or width % 2 or not 0 < width <= D:
        raise ValueError(
            f"{op}: a rotary width of {width} needs to be even, at most the {D} columns of a head, and tables of that "
            f"width or half of it; cos and sin have {R} columns (rotary_dim={rotary_dim})"
        )
    if tracked(cos) or tracked(sin):
        raise ValueError(f"{op}: cos and sin get no gradient, but one of them requires it; detach it")
    return width


def _check_rows(op: str, **tensors: Any) -> None:
    check_float(op, **tensors)
    for name, x in tensors.items():
        if x.dim() != 4:
            raise ValueError(f"{op}: {name} must be (B, N, T, D), got shape {tuple(x.shape)}")


def _by_token(x: torch.Tensor) -> bool:
    return x.stride(2) > x.stride(1)


def opake_rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    trailing: bool = False,
    rotary_dim: int | None = None,
) -> torch.Tensor:
    """Rotate one tensor by position; arguments as in `opake_rope_qk`, x (B, N, T, D)."""
    op = "opake_rope"
    _check_rows(op, x=x)
    width = _check_tables(op, x, cos, sin, rotary_dim)
    if not uses_triton(x, cos, sin):
        return rope_reference(x, cos, sin, interleaved=interleaved, trailing=trailing, rotary_dim=width)
    layout = Layout(width, interleaved, trailing, _by_token(x), False)
    if cos.dim() == 2:
        cos, sin = cos[None], sin[None]
    return _PAIR_ONE(x, cos, sin, 0, layout)


def opake_rope_qk(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    trailing: bool = False,
    rotary_dim: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding of queries and keys in one launch: x * cos + rotate(x) * sin on the columns that turn.

    q: (B, N, T, D), k: (B, K, T, D), any strides, one dtype. The results are new tensors of that dtype; their order of
        dimensions in memory is that of q and k: a transposed view of (B, T, N, D) needs no copy before or after.
    cos, sin: (T, R), (1, T, R) or (B, T, R), any floating dtype; fp32 arithmetic, one rounding. They get no gradient.
    rotary_dim: how many of the D columns turn; R is that width or half of it. Default: D for R = D and R = D / 2, else
        R. Say it where tables of half the head's width turn half the head (GLM 4, Phi 3 with a factor of 0.5) and for
        half-width tables of a slice (DeepSeek).
    interleaved: columns 2i and 2i + 1 are a pair, else i and i + rotary_dim / 2. A table of full width then repeats
        each entry, as Cohere's does; GLM 4 delivers halves, of which `cos[..., : R // 2]` is the one to pass.
    trailing: the last `rotary_dim` columns turn instead of the first.

    Works under any nesting of vmap and grad; backward once, no forward mode. Without CUDA and Triton the plain twin
    serves. Raises TypeError for dtypes, ValueError for shapes, devices and tables that require grad.
    Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021 (arXiv:2104.09864).
    """
    op = "opake_rope_qk"
    _check_rows(op, q=q, k=k)
    check_same_dtype(op, q=q, k=k)
    check_same_device(op, q=q, k=k)
    if (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]):
        raise ValueError(
            f"{op}: q and k may differ in the number of heads only, got shapes {tuple(q.shape)} and {tuple(k.shape)}"
        )
    width = _check_tables(op, q, cos, sin, rotary_dim)
    if not uses_triton(q, cos, sin):
        return rope_qk_reference(q, k, cos, sin, interleaved=interleaved, trailing=trailing, rotary_dim=width)
    layout = Layout(width, interleaved, trailing, _by_token(q), _by_token(k))
    if cos.dim() == 2:
        cos, sin = cos[None], sin[None]
    return _PAIR_QK(q, k, cos, sin, 0, layout)
