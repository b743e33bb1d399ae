"""The three fused attention kernels that PyTorch has for CUDA, each behind the `Backend` protocol.

Their aten operators are called directly, because they return the log-sum-exp that backward needs; each is offered only
where the installed torch has the schema it was written for. Without dropout the random state that they take and return
is never read, so backward is handed zeros instead of one more saved tensor. What a kernel cannot take (alignment, head
sizes, dtypes) is asked of shapes alone, and then the public form serves.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .backend import Backend, Tensors, additive, aten, repeated, schema_matches, summed


def _zeros(like: torch.Tensor, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=like.device)


def _flash_forward(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float | None) -> Any:
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]


def _flash_backward(
    go: Any, q: Any, k: Any, v: Any, mask: Any, out: Any, lse: Any, causal: bool, scale: float | None
) -> Tensors:
    state, unused = _zeros(q, 2, dtype=torch.uint64), _zeros(q, dtype=torch.uint64)
    T, S = q.shape[2], k.shape[2]
    return aten._scaled_dot_product_flash_attention_backward(
        go, q, k, v, out, lse, None, None, T, S, 0.0, causal, state, unused, scale=scale
    )


@functools.cache
def flash_window(window: int) -> Backend:
    """Causal flash attention in which a query sees the last `window` keys: the same kernel, asked one level lower.

    Its tensors are (B, T, heads, D). Offered where `window_serves` says so.
    """
    sides = {"window_size_left": window - 1, "window_size_right": 0}

    def forward(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float | None) -> Any:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        T, S = q.shape[1], k.shape[1]
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, None, None, T, S, 0.0, True, False, scale=scale, **sides
        )  # fmt: skip
        return out.transpose(1, 2), lse

    def backward(
        go: Any, q: Any, k: Any, v: Any, mask: Any, out: Any, lse: Any, causal: bool, scale: float | None
    ) -> Tensors:
        state, unused = _zeros(q, 2, dtype=torch.uint64), _zeros(q, dtype=torch.uint64)
        go, q, k, v, out = (t.transpose(1, 2) for t in (go, q, k, v, out))
        T, S = q.shape[1], k.shape[1]
        found = aten._flash_attention_backward(
            go, q, k, v, out, lse, None, None, T, S, 0.0, True, state, unused, scale=scale, **sides
        )
        return tuple(g.transpose(1, 2) for g in found)

    return Backend(f"flash_window_{window}", 1, forward, backward)


def _efficient_forward(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float | None) -> Any:
    k, v, _ = repeated(q, k, v)
    bias = _full(mask, q, k)
    return aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, scale=scale)[:2]


def _efficient_backward(
    go: Any, q: Any, k: Any, v: Any, mask: Any, out: Any, lse: Any, causal: bool, scale: float | None
) -> Tensors:
    k, v, groups = repeated(q, k, v)
    bias, zero = _full(mask, q, k), _zeros(q, dtype=torch.int64)
    wanted = [True, True, True, False]
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        go, q, k, v, bias, out, lse, zero, zero, 0.0, wanted, causal, scale=scale
    )
    return dq, summed(dk, groups), summed(dv, groups)


def _cudnn_forward(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float | None) -> Any:
    bias = _by_row(mask, q)
    return aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, causal, False, scale=scale)[:2]


def _cudnn_backward(
    go: Any, q: Any, k: Any, v: Any, mask: Any, out: Any, lse: Any, causal: bool, scale: float | None
) -> Tensors:
    bias, zero = _by_row(mask, q), _zeros(q, dtype=torch.int64)
    T, S = q.shape[2], k.shape[2]
    return aten._scaled_dot_product_cudnn_attention_backward(
        go, q, k, v, out, lse, zero, zero, bias, None, None, T, S, 0.0, causal, scale=scale
    )


def _full(mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """The additive mask as a view of (B, N, T, S), which the efficient kernel asks for."""
    bias = additive(mask, q.dtype)
    return None if bias is None else bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def _by_row(mask: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """The additive mask with one entry a row, which the cuDNN kernel asks for."""
    bias = additive(mask, q.dtype)
    return None if bias is None else bias.expand(q.shape[0], *bias.shape[1:]).contiguous()


FLASH = Backend("flash", 1, _flash_forward, _flash_backward)
EFFICIENT = Backend("efficient", 1, _efficient_forward, _efficient_backward)
CUDNN = Backend("cudnn", 1, _cudnn_forward, _cudnn_backward)

_QKV = ["query", "key", "value"]
_STATE = ["cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"]
_PHILOX = ["philox_seed", "philox_offset"]
_LAST = ["dropout_p", "grad_input_mask", "is_causal"]
SCHEMAS = {
    FLASH: {
        "_scaled_dot_product_flash_attention": [*_QKV, "dropout_p", "is_causal", "return_debug_mask", "scale"],
        "_scaled_dot_product_flash_attention_backward": (
            ["grad_out", *_QKV, "out", "logsumexp", *_STATE, *_PHILOX, "scale"]
        ),
    },
    EFFICIENT: {
        "_scaled_dot_product_efficient_attention": (
            [*_QKV, "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal", "scale"]
        ),
        "_scaled_dot_product_efficient_attention_backward": (
            ["grad_out_", *_QKV, "attn_bias", "out", "logsumexp", *_PHILOX, *_LAST, "scale"]
        ),
    },
    CUDNN: {
        "_scaled_dot_product_cudnn_attention": (
            [*_QKV, "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal", "return_debug_mask", "scale"]
        ),
        "_scaled_dot_product_cudnn_attention_backward": (
            ["grad_out", *_QKV, "out", "logsumexp", *_PHILOX, "attn_bias", *_STATE, "scale"]
        ),
    },
}
_WINDOW = ["scale", "window_size_left", "window_size_right"]
WINDOW_SCHEMAS = {
    "_flash_attention_forward": (
        [*_QKV, "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask", *_WINDOW]
    ),
    "_flash_attention_backward": (["grad_out", *_QKV, "out", "logsumexp", *_STATE, "rng_state", "unused", *_WINDOW]),
}
WINDOW_SERVES = schema_matches(WINDOW_SCHEMAS, more=True)
SERVING = {backend: schema_matches(schemas) for backend, schemas in SCHEMAS.items()}


def window_serves(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the flash kernel takes these tensors with causality and a window, and is not switched off."""
    D, half = q.shape[-1], q.dtype in (torch.float16, torch.bfloat16)
    fits = v.shape[-1] == D and D % 8 == 0 and D <= 256 and q.shape[-2] == k.shape[-2] and 0 not in q.shape
    return q.is_cuda and half and fits and WINDOW_SERVES and torch.backends.cuda.flash_sdp_enabled()


def _faster_than_flash(device: torch.device, T: int, S: int) -> bool:
    """Where the cuDNN kernel is the faster one, as PyTorch's own order has it: 0.44 ms to 0.62 on an H200.

    That is forward and backward of 16 rows of 1024 tokens, 14 and 2 heads of 64, bf16. Whole tiles only, so that
    lengths that come in all sizes do not each have a plan made.
    """
    return T % 64 == 0 and S % 64 == 0 and _capability(device) >= (9, 0)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def choose_cuda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool
) -> Backend | None:
    """The kernel for these shapes and dtypes among those that `torch.nn.attention.sdpa_kernel` leaves on, or None."""
    D, T, S = q.shape[-1], q.shape[-2], k.shape[-2]
    if v.shape[-1] != D or D % 8 or D > 256 or (causal and T != S) or 0 in q.shape or 0 in k.shape:
        return None
    half = q.dtype in (torch.float16, torch.bfloat16)
    on = torch.backends.cuda
    aligned = mask is None or (T % 8 == 0 and S % 8 == 0)
    # the cuDNN backward has no deterministic form
    free = not torch.are_deterministic_algorithms_enabled()
    cudnn = half and aligned and free and D <= 128 and on.cudnn_sdp_enabled() and SERVING[CUDNN]
    if mask is None and half and on.flash_sdp_enabled() and SERVING[FLASH]:
        return CUDNN if cudnn and _faster_than_flash(q.device, T, S) else FLASH
    if cudnn:
        return CUDNN
    known = half or q.dtype == torch.float32
    return EFFICIENT if known and aligned and on.mem_efficient_sdp_enabled() and SERVING[EFFICIENT] else None
