"""The grouped path in plain torch: `grouped_mm` over sorted rows, on any device that has it.

The same steps as the fused path, with the rows of each expert brought together by a copy. On a CPU one call serves one
example, because a product of the library there rounds by how many rows it has; elsewhere one call serves all.
"""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

from opake_kernels.activations import Activation

from .routing import Routing
from .through import gate_backward, gate_forward
from .weights import Weights

__all__ = ["Grouped", "alignment"]


def alignment(dtype: torch.dtype) -> int:
    """The number of columns that every matrix of `grouped_mm` must be a multiple of: rows begin at 16 bytes."""
    return 16 // dtype.itemsize


class Grouped:
    """One call: weights, routing and what is derived from them. Methods as in `fused.Fused`."""

    def __init__(self, weights: Weights, routing: Routing, act: Activation, paired: bool) -> None:
        self.w, self.r, self.act, self.paired = weights, routing, act, paired
        self.S = routing.perm.numel()
        self.token = routing.tokens()
        self.gathered: dict[int, torch.Tensor] = {}
        # gate and up of forward (S, 2I), for backward where they are kept
        self.kept: torch.Tensor | None = None
        self.ends = routing.ends[None]
        if routing.by_example and routing.G > 1:
            # each example has the same number of rows, and its ends are counted from its first
            starts = torch.arange(routing.G, device=self.token.device)[:, None] * (self.S // routing.G)
            self.ends = (routing.ends.view(routing.G, -1) - starts).to(torch.int32)

    def _gather(self, rows: torch.Tensor) -> torch.Tensor:
        key = id(rows)
        if key not in self.gathered:
            self.gathered[key] = rows.index_select(0, self.token)
        return self.gathered[key]

    def _product(self, a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """a (S, K) of sorted rows @ w_e (E, K, N)."""
        if len(self.ends) == 1:
            return functional.grouped_mm(a, w, offs=self.ends[0])
        each = zip(a.split(self.S // self.r.G), self.ends, strict=True)
        return torch.cat([functional.grouped_mm(rows, w, offs=ends) for rows, ends in each])

    def _by_expert(self, values: torch.Tensor) -> torch.Tensor:
        """(S, N): a value of each expert (E, N) for each sorted row."""
        return values.index_select(0, self.r.index.reshape(-1).index_select(0, self.r.perm))

    def rows(
        self,
        a: torch.Tensor,
        w: torch.Tensor,
        *,
        low_rank: tuple[torch.Tensor, torch.Tensor] | None = None,
        bias: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
        gather: bool = False,
        scatter: bool = False,
    ) -> torch.Tensor:
        """a @ w_e (+ z @ l_e) (+ bias_e) (* weight), rows of the result in slot order if `scatter`."""
        out = self._product(self._gather(a) if gather else a, w)
        if low_rank is not None:
            out += self._product(*_padded(*low_rank))
        if bias is not None:
            out += self._by_expert(bias)
        if weight is not None:
            each = weight.index_select(0, self.r.perm)[:, None]
            # a wider weight keeps its digits until the choices are added
            out = out * each if each.dtype.itemsize > out.dtype.itemsize else out.mul_(each)
        return self.r.unsorted(out) if scatter else out

    def low_rank(self, a: torch.Tensor, w: torch.Tensor | None, scaling: float, gather: bool) -> torch.Tensor | None:
        """scaling * (a @ w_e), the narrow side of an adapter; None without one."""
        if w is None:
            return None
        rank = w.shape[2]
        w = _wide(w, 2)
        return self._product(self._gather(a) if gather else a, w)[:, :rank].mul_(scaling)

    def combine(self, y: torch.Tensor) -> torch.Tensor:
        """The sum over the choices of each token, y in slot order."""
        each = y.view(-1, self.r.K, y.shape[1])
        if y.dtype.itemsize < 4 or self.r.K == 1:
            return each.sum(1)
        # a reduction over so few is slower than their additions
        first, *rest = each.unbind(1)
        return functools.reduce(torch.Tensor.add_, rest, first.clone())

    def _gate_and_up(self, x: torch.Tensor, z: torch.Tensor | None) -> torch.Tensor:
        low_rank = None if z is None or self.w.B is None else (z, self.w.B)
        return self.rows(x, self.w.gate_up.mT, low_rank=low_rank, bias=self.w.gate_up_bias, gather=True)

    def hidden(self, x: torch.Tensor, z: torch.Tensor | None) -> torch.Tensor:
        """act(gate) * up of the sorted rows."""
        self.kept = self._gate_and_up(x, z)
        return gate_forward(self.kept, self.act, self.paired)

    def gate_gradients(
        self,
        x: torch.Tensor,
        d: torch.Tensor,
        weight: torch.Tensor,
        z: torch.Tensor | None,
        z_down: torch.Tensor | None,
        need_hidden: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Gradient of gate and up (S, 2I), the activation (S, I) if wanted, and d weight (S) in slot order."""
        both = self._gate_and_up(x, z) if self.kept is None else self.kept
        low_rank = None if z_down is None or self.w.A_down is None else (z_down, self.w.A_down.mT)
        dh = self.rows(d, self.w.down, low_rank=low_rank, gather=True)
        each = weight.index_select(0, self.r.perm)[:, None]
        dgu, hidden, inner = gate_backward(dh, each, both, self.act, self.paired, need_hidden)
        return dgu, hidden, self.r.unsorted(inner)

    def segments(
        self,
        p: torch.Tensor,
        q: torch.Tensor,
        dtype: torch.dtype,
        *,
        weight: torch.Tensor | None = None,
        gather_p: bool = False,
        gather_q: bool = False,
    ) -> torch.Tensor:
        """(G, E, m, n): P^T Q over the rows of each example and expert; zeros where there are none."""
        M, N, r = p.shape[1], q.shape[1], self.r
        p, q = (self._gather(t) if gather else t for t, gather in ((p, gather_p), (q, gather_q)))
        if weight is not None:
            p = (p * weight.index_select(0, r.perm)[:, None]).to(p.dtype)
        if p.device.type == "cpu" and dtype.itemsize > p.dtype.itemsize:
            p, q = p.to(dtype), q.to(dtype)
        out = functional.grouped_mm(_wide(p, 1).mT, _wide(q, 1), offs=r.segments())[:, :M, :N]
        if r.by_example:
            return out.unflatten(0, (r.G, r.E)).to(dtype)
        # a view: a stack of gradients is too large for a copy
        return out.unflatten(0, (r.E, r.G)).transpose(0, 1).to(dtype)


def _padded(z: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two sides of a low-rank product with a rank that `grouped_mm` takes."""
    return _wide(z, 1), _wide(factor, 1)


def _wide(t: torch.Tensor, dim: int) -> torch.Tensor:
    """`t` with zeros behind, so that the size of `dim` is one that `grouped_mm` takes; rows dense."""
    missing = -t.shape[dim] % alignment(t.dtype)
    if missing:
        t = functional.pad(t, [0, 0] * (t.dim() - 1 - dim) + [0, missing])
    return t if t.stride(-1) == 1 and not missing else t.contiguous()
