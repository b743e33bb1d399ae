"""The CPU kernel, the public form, and the rule that chooses one backend for a call.

A backend is chosen from shapes, dtypes and the device only, never from contents. The public form is
`F.scaled_dot_product_attention`, differentiated inside the backward: it costs one more forward, runs everywhere, and
lets PyTorch choose the kernel; with a mask on CUDA it is plain operations. Folding of vmapped dimensions happens one
level up, in `folded`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from opake_kernels.launch import HAS_TRITON

from . import cuda
from .backend import Backend, Tensors, additive, aten, repeated, schema_matches, summed
from .cuda import CUDNN, EFFICIENT, FLASH, SERVING, choose_cuda
from .math import attention_reference


def _cpu_forward(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float | None) -> Any:
    k, v, _ = repeated(q, k, v)
    return aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=additive(mask, q.dtype), scale=scale
    )


def _cpu_backward(
    go: Any, q: Any, k: Any, v: Any, mask: Any, out: Any, lse: Any, causal: bool, scale: float | None
) -> Tensors:
    k, v, groups = repeated(q, k, v)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        go, q, k, v, out, lse, 0.0, causal, attn_mask=additive(mask, q.dtype), scale=scale
    )
    return dq, summed(dk, groups), summed(dv, groups)


def _public_forward(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float | None) -> Any:
    gqa = q.shape[1] != k.shape[1]
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=gqa)
    bias = additive(mask, q.dtype)
    if q.is_cuda:
        # what PyTorch 2.11 chose on an H200 for a mask of every row gave wrong gradients at 136 tokens
        return attention_reference(q, k, v, mask=bias, scale=scale)
    # what a kernel makes of a row that sees no key is its own affair, up to NaN: let it see all, then clear it
    blind = (bias == float("-inf")).all(-1, keepdim=True)
    bias = bias.masked_fill(blind, 0.0)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=gqa)
    return out.masked_fill(blind, 0.0)


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


CPU_FLASH_SERVES = schema_matches(_CPU_SCHEMAS)


def choose(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> Backend:
    """The backend for these shapes, dtypes and device."""
    if q.is_cuda:
        return choose_cuda(q, k, v, mask, causal) or PUBLIC
    plain = q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    square = v.shape[-1] == q.shape[-1] and (not causal or q.shape[-2] == k.shape[-2]) and 0 not in k.shape
    return CPU_FLASH if CPU_FLASH_SERVES and plain and square else PUBLIC


def backend_names(device: str) -> list[str]:
    """The kernels that serve a device type here, best first; the last one is always there."""
    if device == "cuda":
        fused = [backend.name for backend in (FLASH, CUDNN, EFFICIENT) if SERVING[backend]] + ["triton"] * HAS_TRITON
    else:
        fused = [CPU_FLASH.name] if device == "cpu" and CPU_FLASH_SERVES else []
    return [*fused, PUBLIC.name]


def unknown_backends(device: str) -> list[str]:
    """The kernels whose operators the installed torch has in another form: the public form serves in their place."""
    if device == "cuda":
        named = {backend.name: serves for backend, serves in SERVING.items()}
        return [name for name, serves in {**named, "flash with a window": cuda.WINDOW_SERVES}.items() if not serves]
    return [CPU_FLASH.name] if device == "cpu" and not CPU_FLASH_SERVES else []
