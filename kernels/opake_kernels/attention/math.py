"""The plain PyTorch twin: softmax(scale * q k^T + mask) v, with every option, in ordinary differentiable operations.

It is also the path for what no fused backend serves exactly (soft cap, sinks, dropout, a learned bias). Softmax runs
in fp32. A fully masked query row gives zeros, and zero gradients: the mask is applied with a finite value and such rows
are cleared afterwards, so no NaN is ever formed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Arguments and result as `opake_attention`; memory grows with the square of the sequence length."""
    groups = q.shape[-3] // k.shape[-3]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    q_BKGTD = q.unflatten(-3, (k.shape[-3], groups))
    scores = (q_BKGTD @ k.unsqueeze(-3).transpose(-1, -2)) * factor
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.flatten(-4, -3).float()
    keep = allowed(q.shape[-2], k.shape[-2], mask, causal, window, q.device)
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask.float().clamp_min(torch.finfo(torch.float32).min)
    if keep is not None:
        scores = scores.masked_fill(~keep, torch.finfo(torch.float32).min)
    weights = _softmax(scores, sinks)
    if keep is not None:
        weights = weights.masked_fill(~keep, 0.0)
    weights = F.dropout(weights.to(q.dtype), dropout)
    weights_BKGTS = weights.unflatten(-3, (k.shape[-3], groups))
    return (weights_BKGTS @ v.unsqueeze(-3)).flatten(-4, -3)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.float().unsqueeze(-1).unsqueeze(-1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def allowed(
    T: int, S: int, mask: torch.Tensor | None, causal: bool, window: int | None, device: torch.device
) -> torch.Tensor | None:
    """The boolean mask that says which keys a query sees, broadcastable to (B, N, T, S); None if it sees all.

    An additive mask forbids a key where it is -inf. `causal` aligns the last query with the last key.
    """
    keep = None
    if mask is not None:
        keep = mask if mask.dtype == torch.bool else mask != float("-inf")
    if causal or window is not None:
        distance = torch.arange(S - T, S, device=device)[:, None] - torch.arange(S, device=device)
        inside = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        if window is not None:
            inside = inside & (distance < window)
        keep = inside if keep is None else keep & inside
    return keep
