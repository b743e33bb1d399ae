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
from .launch import cdiv, jit, launch, next_power_of_2, tl, warps_for

__all__ = ["Layout", "rotate"]

# elements of one program's tile
_TILE = 4096


@lru_cache(maxsize=1024)
def _tile(N: int, T: int, block: int) -> tuple[int, int, int]:
    """(heads, tokens, warps) of one program, for at most N heads of T tokens and `block` pairs of columns."""
    tokens = min(8, next_power_of_2(T))
    heads = min(next_power_of_2(N), max(1, _TILE // (2 * block * tokens)))
    return heads, tokens, warps_for(2 * block * tokens * heads)


@jit
def _turn(
    X, OUT, c1, s1, c2, s2, head, heads, t, tokens, x_n, x_t, o_n, o_t,
    D: tl.constexpr, HALF: tl.constexpr, AT: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, PASS: tl.constexpr,
):  # fmt: skip
    n = head + tl.arange(0, HEADS)
    live = (n < heads)[:, None, None] & (t < tokens)[None, :, None]
    x_at = (n * x_n)[:, None, None] + (t * x_t)[None, :, None]
    o_at = (n * o_n)[:, None, None] + (t * o_t)[None, :, None]
    if INTERLEAVED:
        pair = tl.arange(0, 2 * BLOCK)[None, None, :]
        both = tl.load(X + x_at + AT + pair, live & (pair < 2 * HALF), 0.0).to(tl.float32)
        x1, x2 = tl.split(tl.reshape(both, (HEADS, TOKENS, BLOCK, 2)))
    else:
        i = tl.arange(0, BLOCK)[None, None, :]
        x1 = tl.load(X + x_at + AT + i, live & (i < HALF), 0.0).to(tl.float32)
        x2 = tl.load(X + x_at + AT + HALF + i, live & (i < HALF), 0.0).to(tl.float32)
    if INVERSE:
        y1 = x1 * c1 + x2 * s2
        y2 = x2 * c2 - x1 * s1
    else:
        y1 = x1 * c1 - x2 * s1
        y2 = x2 * c2 + x1 * s2
    if INTERLEAVED:
        both = tl.reshape(tl.join(y1, y2), (HEADS, TOKENS, 2 * BLOCK))
        tl.store(OUT + o_at + AT + pair, both, live & (pair < 2 * HALF))
    else:
        tl.store(OUT + o_at + AT + i, y1, live & (i < HALF))
        tl.store(OUT + o_at + AT + HALF + i, y2, live & (i < HALF))
    if 2 * HALF < D:
        # the columns that do not turn lie behind a leading slice and before a trailing one
        j = tl.arange(0, PASS)[None, None, :]
        at = j + (2 * HALF if AT == 0 else 0)
        kept = live & (j < D - 2 * HALF)
        tl.store(OUT + o_at + at, tl.load(X + x_at + at, kept, 0.0), kept)


@jit(do_not_specialize=["tokens", "batch"])
def _rope_kernel(
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
    t = first.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    i = tl.arange(0, BLOCK)
    ok = (t < tokens)[:, None] & (i < HALF)[None, :]
    table = (b // batch) * c_g + (b % batch) * c_b + t[:, None] * c_t
    # a table of the rotary width is laid out as the head is: halves, or pairs
    one = 2 * i[None, :] if FULL and INTERLEAVED else i[None, :]
    c1 = tl.load(COS + table + one, ok, 0.0).to(tl.float32)[None, :, :]
    s1 = tl.load(SIN + table + one, ok, 0.0).to(tl.float32)[None, :, :]
    c2, s2 = c1, s1
    if FULL:
        two = one + 1 if INTERLEAVED else one + HALF
        c2 = tl.load(COS + table + two, ok, 0.0).to(tl.float32)[None, :, :]
        s2 = tl.load(SIN + table + two, ok, 0.0).to(tl.float32)[None, :, :]
    if block < q_blocks:
        o_n = D if Q_BY_TOKEN else tokens.to(tl.int64) * D
        o_t = q_heads * D if Q_BY_TOKEN else D
        _turn(
            Q + b * q_b, Q_OUT + b * q_heads * tokens * D, c1, s1, c2, s2, block.to(tl.int64) * HEADS, q_heads,
            t, tokens, q_n, q_t, o_n, o_t, D, HALF, AT, INTERLEAVED, INVERSE, HEADS, TOKENS, BLOCK, PASS,
        )  # fmt: skip
    elif K is not None:
        o_n = D if K_BY_TOKEN else tokens.to(tl.int64) * D
        o_t = k_heads * D if K_BY_TOKEN else D
        _turn(
            K + b * k_b, K_OUT + b * k_heads * tokens * D, c1, s1, c2, s2, (block - q_blocks).to(tl.int64) * HEADS,
            k_heads, t, tokens, k_n, k_t, o_n, o_t, D, HALF, AT, INTERLEAVED, INVERSE, HEADS, TOKENS, BLOCK, PASS,
        )  # fmt: skip


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
    if by_token:
        return torch.empty((A, T, N, D), dtype=x.dtype, device=x.device).transpose(1, 2)
    return torch.empty((A, N, T, D), dtype=x.dtype, device=x.device)


def _tables(cos: torch.Tensor, sin: torch.Tensor, groups: int, like: torch.Tensor) -> tuple[Any, Any, int, int, int]:
    """cos and sin with one set of strides (group, row, token); 0 where a table serves all."""
    cos, sin = fold_shared(cos, groups, like), fold_shared(sin, groups, like)
    if cos.shape != sin.shape:
        # one of them is mapped by a vmap and the other is not
        shape = torch.broadcast_shapes(cos.shape, sin.shape)
        cos, sin = cos.expand(shape), sin.expand(shape)
    if cos.stride(-1) != 1 or cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    G, B, _, _ = cos.shape
    g, b, t, _ = cos.stride()
    return cos, sin, g if G > 1 else 0, b if B > 1 else 0, t


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
        _rope_kernel, (programs,), x, x, y, x_out, y_out, cos, sin, T, B, N, K, *strides,
        D=D, HALF=half, AT=rest if layout.trailing else 0, FULL=cos.shape[-1] == layout.width,
        INTERLEAVED=layout.interleaved, INVERSE=inverse, Q_BY_TOKEN=layout.q_by_token, K_BY_TOKEN=layout.k_by_token,
        HEADS=heads, TOKENS=tokens, BLOCK=block, PASS=next_power_of_2(rest), num_warps=warps,
    )  # fmt: skip
