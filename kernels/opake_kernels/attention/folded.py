"""One fused attention call for a whole microbatch, forward and backward, whatever vmap and grad lie around it.

functorch has no batching rule for the backward of any fused attention, and would run it once an example. Here the
mapped dimensions are merged into the batch dimension first, and backward is a Function of its own (see
`opake_kernels.fold`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from opake_kernels.fold import ROWS, SHARED, function_pair

from .backend import Backend
from .masked import fold_mask


def folded_attention(
    backend: Backend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Attention by `backend`: q (B, N, T, D), k, v (B, K, S, D), mask broadcastable to (B, N, T, S); out (B, N, T, D).

    The mask gets no gradient; a mask that asks for one raises in backward.
    """
    if mask is not None and mask.dim() < 4:
        mask = mask[(None,) * (4 - mask.dim())]
    result = _pair(backend)(q, k, v, mask, 0, causal, scale)
    return result[0] if isinstance(result, tuple) else result


@functools.cache
def _pair(backend: Backend) -> Callable[..., Any]:
    def forward(q: Any, k: Any, v: Any, mask: Any, groups: int, causal: bool, scale: float | None) -> Any:
        lead = q.shape[: groups + 1]
        flat = [t.flatten(0, groups) for t in (q, k, v)]
        found = backend.forward(*flat, fold_mask(mask, lead), causal, scale)
        parts = found if isinstance(found, tuple) else (found,)
        parts = tuple(part.unflatten(0, lead) for part in parts)
        return parts if backend.stats else parts[0]

    def backward(grads: Any, saved: Any, need: Any, groups: int, causal: bool, scale: float | None) -> Any:
        if need[3]:
            raise RuntimeError("opake attention: a mask that requires a gradient is not served by a fused backend")
        q, k, v, mask, *rest = saved
        lead = q.shape[: groups + 1]
        flat = [t.flatten(0, groups) for t in (grads[0], q, k, v)]
        kept = [t.flatten(0, groups) for t in rest]
        found = backend.backward(*flat, fold_mask(mask, lead), *kept, causal, scale)
        return *(g.unflatten(0, lead) for g in found), None

    return function_pair(
        f"opake_attention_{backend.name}",
        forward=forward,
        backward=backward,
        roles=(ROWS, ROWS, ROWS, SHARED),
        save_inputs=(0, 1, 2, 3),
        save_outputs=tuple(range(1 + backend.stats)),
        stats=backend.stats,
    )
