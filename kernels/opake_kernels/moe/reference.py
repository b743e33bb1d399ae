"""The plain twin of the op, by which its paths are judged."""

from __future__ import annotations

import torch

from opake_kernels.activations import Activation, activation_for

__all__ = ["moe_reference"]


def moe_reference(
    x: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    activation: str | Activation = "silu",
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    interleaved: bool = False,
) -> torch.Tensor:
    """The plain twin of `opake_moe` for one example: every expert on every token in torch, in the dtype of `x`."""
    act, out = activation_for(activation), torch.zeros_like(x)
    for e in range(gate_up_proj.shape[0]):
        both = x @ gate_up_proj[e].mT
        both = both if gate_up_bias is None else both + gate_up_bias[e]
        gate, up = (both[..., ::2], both[..., 1::2]) if interleaved else both.chunk(2, dim=-1)
        y = act.reference(gate, up) @ down_proj[e].mT
        y = y if down_bias is None else y + down_bias[e]
        out = out + y * (top_k_weights * (top_k_index == e)).sum(-1, keepdim=True).to(y.dtype)
    return out
