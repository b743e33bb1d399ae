"""Our own flash attention: soft caps, sinks, windows and masks that no backend of PyTorch has, one launch a microbatch.

`tiled_attention` is exact for everything but dropout and a learned mask. Under vmap the mapped dimensions are folded
into the batch (see `opake_kernels.fold`); sinks get their gradient per example. Tiles follow from head size and dtype
alone, never from the number of rows, so a row's bits do not depend on how many it travels with. Leaves out choosing:
`backends` and `op` decide when it serves.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from opake_kernels.fold import ROWS, SHARED, fold_shared, function_pair
from opake_kernels.launch import INTERPRET, cdiv, launch, next_power_of_2

from .masked import fold_mask
from .tiles import attention_forward_kernel
from .tiles_backward import delta_kernel, keys_kernel, queries_kernel

__all__ = ["tiled_attention"]


class Tile(NamedTuple):
    """Queries and keys of a tile, warps and loads in flight."""

    queries: int
    keys: int
    warps: int
    stages: int


class Settings(NamedTuple):
    """What a call is asked for besides its tensors; hashable."""

    causal: bool
    scale: float
    window: int | None
    softcap: float | None


def tiled_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Arguments and result as `opake_attention`, on CUDA or in Triton's interpreter; the mask gets no gradient."""
    if mask is not None and mask.dim() < 4:
        mask = mask[(None,) * (4 - mask.dim())]
    settings = Settings(causal, q.shape[-1] ** -0.5 if scale is None else float(scale), window, softcap)
    return _pair(q, k, v, mask, sinks, 0, settings)[0]


# by kernel, padded head size and whether entries are fp32, whose products have no tensor cores
TILES = {
    ("forward", 64, False): Tile(128, 64, 4, 3),
    ("forward", 128, False): Tile(128, 64, 8, 2),
    ("forward", 256, False): Tile(64, 64, 8, 2),
    ("forward", 64, True): Tile(64, 32, 4, 1),
    ("forward", 128, True): Tile(32, 32, 4, 1),
    ("forward", 256, True): Tile(16, 32, 4, 1),
    ("queries", 64, False): Tile(64, 64, 4, 2),
    ("queries", 128, False): Tile(64, 64, 4, 2),
    ("queries", 256, False): Tile(64, 32, 4, 2),
    ("queries", 64, True): Tile(32, 32, 4, 1),
    ("queries", 128, True): Tile(32, 32, 4, 1),
    ("queries", 256, True): Tile(16, 16, 4, 1),
    ("keys", 64, False): Tile(64, 64, 4, 2),
    ("keys", 128, False): Tile(64, 64, 8, 2),
    ("keys", 256, False): Tile(32, 32, 4, 2),
    ("keys", 64, True): Tile(32, 32, 4, 1),
    ("keys", 128, True): Tile(32, 16, 4, 1),
    ("keys", 256, True): Tile(16, 16, 4, 1),
}


def tile_for(kernel: str, columns: int, dtype: torch.dtype) -> Tile:
    """The tile of a kernel: "forward", "queries" or "keys", for (padded) heads of so many columns."""
    if INTERPRET:
        return Tile(16, 16, 1, 1)
    return TILES[kernel, min(max(columns, 64), 256), dtype == torch.float32]


def _forward(q: Any, k: Any, v: Any, mask: Any, sinks: Any, groups: int, settings: Settings) -> Any:
    lead = q.shape[: groups + 1]
    batch = q.shape[groups]
    sinks = None if sinks is None else fold_shared(sinks, groups, q)
    q, k, v = (_dense_columns(t.flatten(0, groups)) for t in (q, k, v))
    A, N, T, D = q.shape
    S, size = k.shape[2], v.shape[3]
    out = torch.empty((A, T, N, size), dtype=q.dtype, device=q.device).transpose(1, 2)
    stat = torch.empty((A, N, 2, T), dtype=torch.float32, device=q.device)
    block = _blocks(D, size)
    tile = tile_for("forward", max(block), q.dtype)
    mask, *strides = _mask(mask, lead, T, S)
    sinks_g = 0 if sinks is None or sinks.shape[0] == 1 else N
    launch(
        attention_forward_kernel, (cdiv(T, tile.queries), A * N), q,
        q, k, v, mask, q if sinks is None else sinks.contiguous(), out, stat, *_scalars(T, S, settings), N, batch,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *strides, *out.stride()[:3], sinks_g,
        HAS_SINKS=sinks is not None, **_meta(q, k, v, mask, settings, tile, block),
    )  # fmt: skip
    return out.unflatten(0, lead), stat.unflatten(0, lead)


def _backward(grads: Any, saved: Any, need: Any, groups: int, settings: Settings) -> Any:
    if need[3]:
        raise RuntimeError("opake attention: a mask that requires a gradient is not served by the fused kernel")
    q, k, v, mask, sinks, out, stat = saved
    lead, batch = q.shape[: groups + 1], q.shape[groups]
    mask, *strides = _mask(mask, lead, q.shape[-2], k.shape[-2])
    go, q, k, v, out = (_dense_columns(t.flatten(0, groups)) for t in (grads[0], q, k, v, out))
    stat = stat.flatten(0, groups).contiguous()
    A, N, T, D = q.shape
    K, S, size = k.shape[1], k.shape[2], v.shape[3]
    block = _blocks(D, size)
    tile = tile_for("queries", max(block), q.dtype)
    delta = torch.empty((A, N, T), dtype=torch.float32, device=q.device)
    rows = (cdiv(T, tile.queries), A * N)
    launch(
        delta_kernel, rows, q, go, out, delta, T, N, *go.stride()[:3], *out.stride()[:3],
        DV=size, BM=tile.queries, BV=block[1],
    )  # fmt: skip
    given = (go, q, k, v, mask, stat, delta)
    places = (*go.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *strides)
    scalars = (*_scalars(T, S, settings), N)
    meta = _meta(q, k, v, mask, settings, tile, block)
    dq = dk = dv = dsinks = None
    if need[0]:
        dq = _by_token(q)
        launch(queries_kernel, rows, q, *given, dq, *scalars, *places, *dq.stride()[:3], **meta)
        dq = dq.unflatten(0, lead)
    if need[1] or need[2]:
        dk, dv = _by_token(k), _by_token(v)
        tile = tile_for("keys", max(block), q.dtype)
        columns, meta = (cdiv(S, tile.keys), A * K), meta | _shape(tile)
        launch(keys_kernel, columns, q, *given, dk, dv, *scalars, *places, *dk.stride()[:3], *dv.stride()[:3], **meta)
        dk, dv = dk.unflatten(0, lead), dv.unflatten(0, lead)
    if need[4]:
        dsinks = _sinks_gradient(fold_shared(sinks, groups, saved[0]), stat, delta, batch).to(sinks.dtype)
        dsinks = dsinks.unflatten(0, lead[:-1]) if groups else dsinks[0]
    return dq, dk, dv, None, dsinks


_pair = function_pair(
    "opake_attention_triton",
    forward=_forward,
    backward=_backward,
    roles=(ROWS, ROWS, ROWS, SHARED, SHARED),
    save_inputs=(0, 1, 2, 3, 4),
    save_outputs=(0, 1),
    stats=1,
)


def _sinks_gradient(sinks: torch.Tensor, stat: torch.Tensor, delta: torch.Tensor, batch: int) -> torch.Tensor:
    """(1 | G, N) sinks, statistics and delta of (G * batch, N, T) rows -> (G, N): minus the weight of the sink times
    delta, summed over the rows of each group."""
    G = delta.shape[0] // max(batch, 1)
    # a rounding of the sink would be the same in every row, and add up
    wide = sinks.double().repeat_interleave(batch, 0) if sinks.shape[0] > 1 else sinks.double()
    log_total = stat.double().sum(2) * math.log(2.0)
    weight = torch.exp(wide.unsqueeze(-1) - log_total)
    return -(weight * delta).sum(-1).unflatten(0, (G, batch)).sum(1)


def _dense_columns(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _by_token(x: torch.Tensor) -> torch.Tensor:
    """An empty tensor of the shape of x (A, heads, tokens, D), in memory by token, as projections make it."""
    A, heads, tokens, size = x.shape
    return torch.empty((A, tokens, heads, size), dtype=x.dtype, device=x.device).transpose(1, 2)


def _blocks(D: int, size: int) -> tuple[int, int]:
    """Columns of queries and of values in a tile."""
    return max(16, next_power_of_2(D)), max(16, next_power_of_2(size))


def _mask(mask: torch.Tensor | None, lead: Any, T: int, S: int) -> tuple[Any, int, int, int, int]:
    """The mask folded, booleans as bytes, and its strides; 0 where it is broadcast."""
    if mask is None:
        return None, 0, 0, 0, 0
    mask = fold_mask(mask, lead)
    assert mask is not None
    if mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    return mask, *(stride if size > 1 else 0 for stride, size in zip(mask.stride(), mask.shape, strict=True))  # type: ignore[return-value]


def _scalars(T: int, S: int, settings: Settings) -> tuple[int, int, int, int, float, float]:
    return T, S, S - T, settings.window or 0, settings.scale, settings.softcap or 1.0


def _meta(q: Any, k: Any, v: Any, mask: Any, settings: Settings, tile: Tile, block: tuple[int, int]) -> dict[str, Any]:
    return {
        "D": q.shape[3], "DV": v.shape[3], "GROUP": q.shape[1] // max(k.shape[1], 1),
        "CAUSAL": settings.causal, "WINDOW": settings.window is not None, "SOFTCAP": settings.softcap is not None,
        "MASK": 0 if mask is None else 1 if mask.dtype == torch.uint8 else 2, "PRECISE": q.dtype == torch.float32,
        "BD": block[0], "BV": block[1], **_shape(tile),
    }  # fmt: skip


def _shape(tile: Tile) -> dict[str, int]:
    return {"BM": tile.queries, "BN": tile.keys, "num_warps": tile.warps, "num_stages": tile.stages}
