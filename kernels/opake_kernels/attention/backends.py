"""The fused attention calls that PyTorch has, behind one small protocol, and the rule that chooses one.

A backend is chosen from shapes, dtypes and the device only, never from contents. Each aten backend is offered where its
schema is the one it was written for; the public form (`F.scaled_dot_product_attention`, differentiated inside the
backward) is always there. Folding of vmapped dimensions happens one level up, in `folded`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

aten = torch.ops.aten
Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Backend:
    """forward(q, k, v, mask, causal, scale) -> (out, *stats); backward(go, q, k, v, mask, out, *stats, causal, scale).

    Shapes are folded: q (B, N, T, D), k and v (B, K, S, D), mask (B|1, N|1, T, S) or None. `stats` have B first.
    """

    name: str
    stats: int
    forward: Callable[..., Any]
    backward: Callable[..., Tensors]


def additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A mask to be added to the scores: forbidden keys are -inf, never the smallest finite number.

    With a finite number a fully masked row would attend to all keys, and the fused backward passes disagree with their
    forwards there.
    """
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    mask = mask.to(dtype)
    return mask.masked_fill(mask <= torch.finfo(dtype).min, float("-inf"))


def _repeated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    groups = q.shape[1] // k.shape[1]
    return (k, v, 1) if groups == 1 else (k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), groups)


def _summed(grad: torch.Tensor, groups: int) -> torch.Tensor:
    return grad if groups == 1 else grad.unflatten(1, (grad.shape[1] // groups, groups)).sum(2)


def _cpu_forward(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float | None) -> Any:
    k, v, _ = _repeated(q, k, v)
    return aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=additive(mask, q.dtype), scale=scale
    )


def _cpu_backward(
    go: Any, q: Any, k: Any, v: Any, mask: Any, out: Any, lse: Any, causal: bool, scale: float | None
) -> Tensors:
    k, v, groups = _repeated(q, k, v)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        go, q, k, v, out, lse, 0.0, causal, attn_mask=additive(mask, q.dtype), scale=scale
    )
    return dq, _summed(dk, groups), _summed(dv, groups)


def _public_forward(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float | None) -> Any:
    if mask is not None and mask.dtype != torch.bool:
        mask = additive(mask, q.dtype)
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=gqa)


def _public_backward(
    go: Any, q: Any, k: Any, v: Any, mask: Any, out: Any, causal: bool, scale: float | None
) -> Tensors:
    with torch.enable_grad():
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        again = _public_forward(q, k, v, mask, causal, scale)
    return torch.autograd.grad(again, (q, k, v), go)


PUBLIC = Backend("public", 0, _public_forward, _public_backward)
CPU_FLASH = Backend("cpu_flash", 1, _cpu_forward, _cpu_backward)

_CPU_SCHEMAS = {
    "_scaled_dot_product_flash_attention_for_cpu": (
        ["query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale"]
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        ["grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal", "attn_mask", "scale"]
    ),
}


def schema_matches(schemas: dict[str, list[str]]) -> bool:
    """Whether the installed torch has these aten operators with just these argument names."""
    for name, arguments in schemas.items():
        packet = getattr(aten, name, None)
        if packet is None or [a.name for a in packet.default._schema.arguments] != arguments:
            return False
    return True


CPU_FLASH_SERVES = schema_matches(_CPU_SCHEMAS)


def choose(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> Backend:
    """The backend for these shapes, dtypes and device."""
    plain = q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    square = v.shape[-1] == q.shape[-1] and (not causal or q.shape[-2] == k.shape[-2])
    return CPU_FLASH if CPU_FLASH_SERVES and plain and square else PUBLIC
