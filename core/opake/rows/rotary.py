"""`Rotary` in place: `apply_rotary_pos_emb` replaced in the attention forwards of one model, queries and keys at once.

The layout (halves or interleaved pairs, tables of full or half width) is found by running the family's own function on
a few numbers. A partial rotation is known by the width of the tables at the call.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from opake.patching.instance import rebind, unbound
from opake.patching.undo import Skip, Undo, put
from opake_kernels.rope import opake_rope_qk

from .probe import numbers

if TYPE_CHECKING:
    from opake.records import Rotary

NAME = "apply_rotary_pos_emb"


class Layout(NamedTuple):
    """Interleaved pairs or halves, and which columns of the tables the family passes hold the angles once each."""

    interleaved: bool
    tables: str


LAYOUTS = tuple(Layout(pairs, tables) for pairs in (False, True) for tables in ("halves", "pairs", "once"))


def sites(record: Rotary, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules of the family's modeling file whose forward calls the function."""
    for name, module in model.named_modules():
        own = type(module).__module__ == record.cls.module.__name__
        if own and rebind(unbound(module, "forward"), {NAME: None}) is not None:
            yield name, module


def fits(record: Rotary, module: nn.Module) -> Skip | None:
    if layout_of(record.cls.module) is None:
        return Skip(f"{record.cls.__name__}.{NAME} rotates in a layout that the op does not know; it stays as it is")
    return None


def apply(record: Rotary, module: nn.Module) -> Undo:
    layout = layout_of(record.cls.module)
    assert layout is not None, "checked by fits"
    forward = rebind(unbound(module, "forward"), {NAME: functools.partial(rotate, layout)})
    assert forward is not None, "found by sites"
    return Undo([put(module, "forward", MethodType(forward, module))])


def rotate(
    layout: Layout, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The family's function by the fused op: q (B, N, T, D), k (B, K, T, D), tables (B, T, R); or heads third."""
    unsqueeze_dim = kwargs.get("unsqueeze_dim", args[-1] if args and isinstance(args[-1], int) else 1)
    by_token = unsqueeze_dim == 2
    if by_token:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    width = cos.shape[-1] * (2 if layout.tables == "once" else 1)
    cos, sin = _once(cos, layout.tables), _once(sin, layout.tables)
    q, k = opake_rope_qk(q, k, cos, sin, interleaved=layout.interleaved, rotary_dim=width)
    return (q.transpose(1, 2), k.transpose(1, 2)) if by_token else (q, k)


def _once(table: torch.Tensor, form: str) -> torch.Tensor:
    if form == "halves":
        return table[..., : table.shape[-1] // 2]
    return table[..., ::2] if form == "pairs" else table


@functools.cache
def layout_of(module: Any) -> Layout | None:
    """The layout that a modeling module's function rotates in, or None if it is none of ours."""
    stock = getattr(module, NAME, None)
    if stock is None:
        return None
    q, k, angles = numbers(2, 4, 3, 8), numbers(2, 2, 3, 8, seed=1), numbers(2, 3, 4, seed=2)
    forms = {
        "halves": torch.cat([angles, angles], -1),
        "pairs": angles.repeat_interleave(2, -1),
        "once": angles,
    }
    for layout in LAYOUTS:
        cos, sin = forms[layout.tables].cos(), forms[layout.tables].sin()
        try:
            expected = stock(q, k, cos, sin)
            found = rotate(layout, q, k, cos, sin)
        except Exception:  # a width or a signature that the family does not take: not this layout
            continue
        if all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(expected, found, strict=True)):
            return layout
    return None
