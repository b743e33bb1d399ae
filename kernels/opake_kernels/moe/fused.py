"""The fused path: Triton products over sorted rows with the gate inside, for half precision on CUDA.

Forward writes the activation (S, I) and the rows of every choice (S, H); backward computes the activation again from x.
S = tokens * choices. Nothing is copied to bring the tokens of an expert together: kernels read them in place, and write
in token order. Block sizes follow from shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from opake_kernels.activations import Activation, kernel_kind
from opake_kernels.launch import INTERPRET, cdiv, launch, next_power_of_2

from .descriptors import descriptor
from .gate_kernels import gate_backward_kernel, gate_forward_kernel
from .product_kernels import combine_kernel, map_kernel, rows_kernel, segments_kernel
from .routing import Routing
from .weights import Weights

__all__ = ["Fused", "Tile"]


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows, columns and depth of a tile, and how it runs."""

    BM: int
    BN: int
    BK: int
    warps: int
    stages: int

    def meta(self) -> dict[str, int]:
        sizes = {"BM": self.BM, "BN": self.BN, "BK": self.BK, "GROUP": 8}
        return {**sizes, "num_warps": self.warps, "num_stages": self.stages}

    def serves(self, K: int) -> bool:
        """Whether descriptors may serve products of this depth: whole tiles of the large kind."""
        return self.BM == 128 and self.BN >= 128 and K % self.BK == 0


def _tile(rows_an_expert: float, N: int, K: int, gated: bool) -> Tile:
    """The tile for products of (rows, K) and (K, N), N counted in columns that are written."""
    if INTERPRET:
        return Tile(16, 16, 16, 1, 1)
    BM = 128 if rows_an_expert > 64 else 64 if rows_an_expert > 16 else 16
    BK = 64 if K >= 64 else 32
    BN = min(128 if gated else 256, max(32, next_power_of_2(N)))
    if BM == 16:
        return Tile(BM, min(BN, 64), BK, 4, 4)
    if BM == 64:
        return Tile(BM, min(BN, 64 if gated else 128), BK, 4, 4)
    wide = BN == 256 and not gated
    return Tile(BM, BN, BK, 8 if BN * (2 if gated else 1) > 64 else 4, 4 if wide else 3)


class Fused:
    """One call: weights, routing and what is derived from them for the launches."""

    def __init__(self, weights: Weights, routing: Routing, act: Activation, paired: bool) -> None:
        self.w, self.r, self.act, self.paired = weights, routing, act, paired
        self.S = routing.perm.numel()
        self.tiles: dict[int, tuple[torch.Tensor, int]] = {}

    def _map(self, BM: int) -> tuple[torch.Tensor, int]:
        """(MAP, most tiles) for tiles of BM rows."""
        if BM not in self.tiles:
            E = self.w.sizes[0]
            count = self.S // BM + min(E, self.S)
            made = torch.empty(count, 3, dtype=torch.int32, device=self.r.perm.device)
            EP = next_power_of_2(E)
            block = max(16, min(128, 8192 // EP))
            launch(
                map_kernel, (cdiv(count, block),), made, self.r.ends, made, E, count,
                BM=BM, EP=EP, BLOCK=block, num_warps=4,
            )  # fmt: skip
            self.tiles[BM] = made, count
        return self.tiles[BM]

    def _shared_meta(self, like: torch.Tensor, K: int, BK: int, rank: int) -> dict[str, Any]:
        return {
            "EVEN": K % BK == 0,
            "PRECISE": like.dtype == torch.float32,
            "RANK": rank,
            "BR": max(16, min(64, next_power_of_2(rank or 1))),
        }

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
        """a @ w_e (+ z @ l_e) (+ bias_e) (* weight) for w (E, K, N) in any strides; see `rows_kernel`."""
        E, K, N = w.shape
        tile = _tile(self.S / E, N, K, False)
        made, count = self._map(tile.BM)
        out = torch.empty(self.S, N, dtype=a.dtype, device=a.device)
        z, factor = low_rank or (a, w)
        NB = cdiv(N, tile.BN)
        turned = w.stride(1) == 1
        box = (tile.BN, tile.BK) if turned else (tile.BK, tile.BN)
        DW = descriptor(w.mT if turned else w, box) if N % tile.BN == 0 and tile.serves(K) else None
        DA = None if DW is None else DW if gather else descriptor(a[None], (tile.BM, tile.BK))
        launch(
            rows_kernel, (count * NB,), a, a, w, a if DA is None else DA, w if DA is None else DW, z, factor,
            bias if bias is not None else a, weight if weight is not None else a, self.r.perm, made, out, count, NB,
            self.r.K, K, N, a.stride(0), w.stride(0), w.stride(2), w.stride(1),
            factor.stride(0), factor.stride(2), factor.stride(1), N,
            GATHER=gather, SCATTER=scatter, SCALED=weight is not None, HAS_BIAS=bias is not None,
            WHOLE=N % tile.BN == 0, TMA=DA is not None, TURNED=turned,
            **self._shared_meta(a, K, tile.BK, z.shape[1] if low_rank else 0), **tile.meta(),
        )  # fmt: skip
        return out

    def low_rank(self, a: torch.Tensor, w: torch.Tensor | None, scaling: float, gather: bool) -> torch.Tensor | None:
        """scaling * (a @ w_e), the narrow side of an adapter; None without one."""
        return None if w is None else self.rows(a, w, gather=gather).mul_(scaling)

    def combine(self, y: torch.Tensor) -> torch.Tensor:
        """The sum over the choices of each token, y in token order."""
        H, K = y.shape[1], self.r.K
        if K == 1:
            return y
        out = torch.empty(self.S // K, H, dtype=y.dtype, device=y.device)
        block = min(1024, next_power_of_2(H))
        NB = cdiv(H, block)
        launch(
            combine_kernel, (out.shape[0] * NB,), y, y, out, H, NB, TOP=K, BLOCK=block, num_warps=max(1, block // 256)
        )
        return out

    def hidden(self, x: torch.Tensor, z: torch.Tensor | None) -> torch.Tensor:
        """act(gate) * up of the sorted rows."""
        return self._gate(x, z, active=True)

    def _gate(self, x: torch.Tensor, z: torch.Tensor | None, active: bool) -> torch.Tensor:
        """act(gate) * up (S, I) if `active`, else gate and up (S, 2I)."""
        w = self.w
        _, I, H = w.sizes
        tile = _tile(self.S / w.sizes[0], I, H, True)
        made, count = self._map(tile.BM)
        NB = cdiv(I, tile.BN)
        out = torch.empty(self.S, I if active else 2 * I, dtype=x.dtype, device=x.device)
        factor = w.gate_up if w.B is None else w.B.mT
        plain = not self.paired and z is None and w.gate_up_bias is None and I % tile.BN == 0 and tile.serves(H)
        DW = descriptor(w.gate_up, (tile.BN, tile.BK)) if plain else None
        tile = tile if DW is None else replace(tile, stages=4)
        launch(
            gate_forward_kernel, (count * NB,), x, x, w.gate_up, w.gate_up if DW is None else DW,
            x if w.gate_up_bias is None else w.gate_up_bias, x if z is None else z, factor, self.r.perm, made, out,
            count, NB, self.r.K, H, I, x.stride(0), *w.gate_up.stride(), *factor.stride(),
            self.act.alpha, self.act.limit, self.act.offset,
            KIND=kernel_kind(self.act, x.dtype), CLAMP=bool(self.act.limit), HAS_BIAS=w.gate_up_bias is not None,
            PAIRED=self.paired, ACTIVE=active, WHOLE=I % tile.BN == 0, TMA=DW is not None,
            **self._shared_meta(x, H, tile.BK, 0 if z is None else z.shape[1]), **tile.meta(),
        )  # fmt: skip
        return out

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
        w, I = self.w, self.w.sizes[1]
        low_rank = None if z_down is None or w.A_down is None else (z_down, w.A_down.mT)
        dh = self.rows(d, w.down, low_rank=low_rank, gather=True)
        gu = self._gate(x, z, active=False)
        hidden = torch.empty_like(dh) if need_hidden else None
        dw = torch.empty(self.S, dtype=torch.float32, device=x.device)
        block = min(1024, next_power_of_2(I))
        launch(
            gate_backward_kernel, (self.S,), d, dh, gu, gu if hidden is None else hidden, weight, dw, self.r.perm, I,
            self.act.alpha, self.act.limit, self.act.within, self.act.offset, KIND=kernel_kind(self.act, x.dtype),
            CLAMP=bool(self.act.limit), PAIRED=self.paired, NEED_H=need_hidden, BLOCK=block,
            num_warps=max(1, block // 256),
        )  # fmt: skip
        return gu, hidden, dw

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
        G, E, M, N = self.r.G, self.r.E, p.shape[1], q.shape[1]
        ends = self.r.segments()
        out = torch.empty(G, E, M, N, dtype=dtype, device=p.device)
        if INTERPRET:
            BM, BN, BR, warps = 16, 16, 16, 1
        else:
            BM, BN = (min(128, max(16, next_power_of_2(n))) for n in (M, N))
            BR, warps = 32, 8 if BM * BN >= 128 * 64 else 4
        NM, NN = cdiv(M, BM), cdiv(N, BN)
        launch(
            segments_kernel, (G * E * NM * NN,), p, p, q, weight if weight is not None else p, self.r.perm, ends, out,
            NM, NN, self.r.K, M, N, E, G, p.stride(0), q.stride(0),
            GATHER_P=gather_p, GATHER_Q=gather_q, SCALED=weight is not None, PRECISE=p.dtype == torch.float32,
            BM=BM, BN=BN, BR=BR, num_warps=warps,
        )  # fmt: skip
        return out
