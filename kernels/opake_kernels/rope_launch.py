"""Triton kernel of the rotation, and the way from tensors to its one launch; the op is rope.py.

A program holds a few heads of a few tokens: it reads their cosines and sines once and turns every head by them.
Queries, keys and tables are read through their strides; results are dense, with the tokens or the heads outermost as
in the input, so that neighbouring programs touch neighbouring memory. Leaves out every check: the public functions
have made them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from .fold import fold_shared
from .launch import cdiv, jit, launch, next_power_of_2, tl

__all__ = ["Layout", "rotate"]

# pairs of columns in one program, and in one program for each head
_TILE, _TILE_HEAD = 2048, 1024


@lru_cache(maxsize=1024)
def _tile(N: int, T: int, block: int) -> tuple[int, int, int]:
    """(heads, tokens, warps) of one program, for at most N heads of T tokens and `block` pairs of columns.

    Eight pairs a thread for each head: then a thread reads 16 bytes at a time and its tables need no exchange.
    """
    tokens = min(max(1, _TILE_HEAD // block), next_power_of_2(T))
    heads = min(next_power_of_2(N), max(1, _TILE // (tokens * block)))
    return heads, tokens, min(max(1, tokens * block // 256), 8)


def _name(specialized: Any) -> str:
    """What a profile shows: backward is the same kernel, turning the other way."""
    return "rope_bwd_kernel" if specialized.constants["INVERSE"] else "rope_fwd_kernel"


@jit(do_not_specialize=["tokens", "batch"], repr=_name)
def rope_kernel(
    Q, K, Q_OUT, K_OUT, COS, SIN, tokens, batch, q_heads, k_heads,
    q_b, q_n, q_t, k_b, k_n, k_t, c_g, c_b, c_t,
    D: tl.constexpr, HALF: tl.constexpr, AT: tl.constexpr, FULL: tl.constexpr, INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr, Q_BY_TOKEN: tl.constexpr, K_BY_TOKEN: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, PASS: tl.constexpr,
):  # fmt: skip
    q_blocks = (q_heads + HEADS - 1) // HEADS
    head_blocks = q_blocks + (k_heads + HEADS - 1) // HEADS
    token_blocks = (tokens + TOKENS - 1) // TOKENS
    program = tl.program_id(0)
    # neighbouring programs take neighbouring memory
    if Q_BY_TOKEN:
        block = program % head_blocks
        first = (program // head_blocks) % token_blocks
    else:
        first = program % token_blocks
        block = (program // token_blocks) % head_blocks
    b = (program // (head_blocks * token_blocks)).to(tl.int64)
    per_head = tl.cast(tokens, tl.int64) * D
    heads, head = tl.cast(q_heads, tl.int32), block.to(tl.int64) * HEADS
    X, OUT = Q + b * q_b, Q_OUT + b * q_heads * per_head
    x_n, x_t = tl.cast(q_n, tl.int64), tl.cast(q_t, tl.int64)
    o_n = tl.cast(D if Q_BY_TOKEN else per_head, tl.int64)
    o_t = tl.cast(q_heads * D if Q_BY_TOKEN else D, tl.int64)
    if K is not None:  # noqa: SIM102 - this test is the compiler's, the next one the program's
        if block >= q_blocks:
            heads, head = tl.cast(k_heads, tl.int32), (block - q_blocks).to(tl.int64) * HEADS
            X, OUT = K + b * k_b, K_OUT + b * k_heads * per_head
            x_n, x_t = tl.cast(k_n, tl.int64), tl.cast(k_t, tl.int64)
            o_n = tl.cast(D if K_BY_TOKEN else per_head, tl.int64)
            o_t = tl.cast(k_heads * D if K_BY_TOKEN else D, tl.int64)
    # tokens first: the compiler spreads threads over them, and a thread's tables then serve all of its heads
    t = (first.to(tl.int64) * TOKENS + tl.arange(0, TOKENS))[:, None, None]
    n = (head + tl.arange(0, HEADS))[None, :, None]
    i = tl.arange(0, BLOCK)[None, None, :]
    live = (n < heads) & (t < tokens)
    X += n * x_n + t * x_t
    OUT += n * o_n + t * o_t
    # everything is asked for before anything is waited for
    if INTERLEAVED:
        pair = tl.arange(0, 2 * BLOCK)[None, None, :]
        both = tl.load(X + AT + pair, live & (pair < 2 * HALF), 0.0)
    else:
        x1 = tl.load(X + AT + i, live & (i < HALF), 0.0)
        x2 = tl.load(X + AT + HALF + i, live & (i < HALF), 0.0)
    table = (b // batch) * c_g + (b % batch) * c_b + t * c_t
    if FULL and INTERLEAVED:
        # a table of the rotary width is laid out as the head is: pairs here, halves below
        ok = (t < tokens) & (pair < 2 * HALF)
        c, s = tl.load(COS + table + pair, ok, 0.0), tl.load(SIN + table + pair, ok, 0.0)
        c1, c2 = tl.split(tl.reshape(c.to(tl.float32), (TOKENS, 1, BLOCK, 2)))
        s1, s2 = tl.split(tl.reshape(s.to(tl.float32), (TOKENS, 1, BLOCK, 2)))
    else:
        ok = (t < tokens) & (i < HALF)
        c, s = tl.load(COS + table + i, ok, 0.0), tl.load(SIN + table + i, ok, 0.0)
        c1, s1 = c.to(tl.float32), s.to(tl.float32)
        c2, s2 = c1, s1
        if FULL:
            c2 = tl.load(COS + table + HALF + i, ok, 0.0).to(tl.float32)
            s2 = tl.load(SIN + table + HALF + i, ok, 0.0).to(tl.float32)
    if INTERLEAVED:
        x1, x2 = tl.split(tl.reshape(both, (TOKENS, HEADS, BLOCK, 2)))
    x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    if INVERSE:
        y1 = x1 * c1 + x2 * s2
        y2 = x2 * c2 - x1 * s1
    else:
        y1 = x1 * c1 - x2 * s1
        y2 = x2 * c2 + x1 * s2
    if INTERLEAVED:
        both = tl.reshape(tl.join(y1, y2), (TOKENS, HEADS, 2 * BLOCK))
        tl.store(OUT + AT + pair, both, live & (pair < 2 * HALF))
    else:
        tl.store(OUT + AT + i, y1, live & (i < HALF))
        tl.store(OUT + AT + HALF + i, y2, live & (i < HALF))
    if 2 * HALF < D:
        # the columns that do not turn lie behind a leading slice and before a trailing one
        j = tl.arange(0, PASS)[None, None, :] + (2 * HALF if AT == 0 else 0)
        kept = live & (j < (D if AT == 0 else AT))
        tl.store(OUT + j, tl.load(X + j, kept, 0.0), kept)


@dataclass(frozen=True, slots=True)
class Layout:
    """The settings of a call: what turns, and whether a token's heads lie together in memory (B, T, N, D)."""

    width: int
    interleaved: bool
    trailing: bool
    q_by_token: bool
    k_by_token: bool


def _fold(x: torch.Tensor, groups: int) -> torch.Tensor:
    """(*groups, B, N, T, D) -> (G * B, N, T, D) with unit column stride; a view where the strides allow it."""
    if groups:
        x = x.reshape(-1, *x.shape[groups + 1 :]) if x.numel() else x.new_empty(0, *x.shape[groups + 1 :])
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _like(x: torch.Tensor, by_token: bool) -> torch.Tensor:
    """A dense (A, N, T, D) tensor, in memory as (A, T, N, D) if `by_token`."""
    A, N, T, D = x.shape
    if x.stride() == ((T * N * D, D, N * D, 1) if by_token else (N * T * D, T * D, D, 1)):
        return torch.empty_like(x)
    if by_token:
        return torch.empty((A, T, N, D), dtype=x.dtype, device=x.device).transpose(1, 2)
    return torch.empty((A, N, T, D), dtype=x.dtype, device=x.device)


def _tables(cos: torch.Tensor, sin: torch.Tensor, groups: int, like: torch.Tensor) -> tuple[Any, Any, int, int, int]:
    """cos and sin with one set of strides (group, row, token); 0 where a table serves all."""
    if groups:
        cos, sin = fold_shared(cos, groups, like), fold_shared(sin, groups, like)
        if cos.shape != sin.shape:
            # one of them is mapped by a vmap and the other is not
            shape = torch.broadcast_shapes(cos.shape, sin.shape)
            cos, sin = cos.expand(shape), sin.expand(shape)
    if cos.stride(-1) != 1 or cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    strides = cos.stride()
    group = strides[0] if groups and cos.shape[0] > 1 else 0
    return cos, sin, group, strides[-3] if cos.shape[-3] > 1 else 0, strides[-2]


def rotate(x, y, cos, sin, groups, layout, inverse):
    """Rotated copies of x (*groups, B, N, T, D) and, if not None, of y."""
    B, lead = x.shape[groups], x.shape[: groups + 1]
    cos, sin, *table_strides = _tables(cos, sin, groups, x)
    x = _fold(x, groups)
    y = None if y is None else _fold(y, groups)
    x_out = _like(x, layout.q_by_token)
    y_out = None if y is None else _like(y, layout.k_by_token)
    if x.numel() or (y is not None and y.numel()):
        _launch(x, y, x_out, y_out, cos, sin, B, table_strides, layout, inverse)
    if groups == 0:
        return x_out, y_out
    return x_out.unflatten(0, lead), None if y_out is None else y_out.unflatten(0, lead)


def _launch(x, y, x_out, y_out, cos, sin, B, table_strides, layout, inverse) -> None:
    A, N, T, D = x.shape
    K = 0 if y is None else y.shape[1]
    half, rest = layout.width // 2, D - layout.width
    block = next_power_of_2(half)
    heads, tokens, warps = _tile(max(N, K), T, block)
    programs = A * cdiv(T, tokens) * (cdiv(N, heads) + cdiv(K, heads))
    strides = (*x.stride()[:3], *((0, 0, 0) if y is None else y.stride()[:3]), *table_strides)
    launch(
        rope_kernel, (programs,), x, x, y, x_out, y_out, cos, sin, T, B, N, K, *strides,
        D=D, HALF=half, AT=rest if layout.trailing else 0, FULL=cos.shape[-1] == layout.width,
        INTERLEAVED=layout.interleaved, INVERSE=inverse, Q_BY_TOKEN=layout.q_by_token, K_BY_TOKEN=layout.k_by_token,
        HEADS=heads, TOKENS=tokens, BLOCK=block, PASS=next_power_of_2(rest), num_warps=warps,
    )  # fmt: skip
