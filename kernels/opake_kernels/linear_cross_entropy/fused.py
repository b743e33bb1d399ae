"""Back end for CUDA: whole rows of logits for a chunk of tokens at a time, in a buffer that holds nothing for long.

A chunk is two matrix products of the vendor's library with one Triton launch between them, which turns the logits into
their gradient where they lie: the fewest products that a frozen head allows. Chunks are wide enough to fill the device
and small enough that the buffer is a fraction of what is saved. Leaves out groups and reduction (op.py).
"""

from __future__ import annotations

import torch

from opake_kernels.launch import cdiv

from .passes import Gradients, Head, Need, accumulator_dtype, product_into
from .softmax_grad import softmax_grad_

__all__ = ["BUFFER_BYTES", "TILE_TOKENS", "chunk_tokens", "fused_pass"]

# what the logits of a chunk may take, and the tile of the matrix unit in tokens
BUFFER_BYTES = 256 * 2**20
TILE_TOKENS = 128


def chunk_tokens(R: int, V: int, element_size: int) -> int:
    """Tokens in a chunk: what the budget holds, in multiples of the matrix unit's tile, shared out evenly."""
    most = max(BUFFER_BYTES // (V * element_size) // TILE_TOKENS * TILE_TOKENS, TILE_TOKENS)
    if most >= R:
        return max(R, 1)
    return cdiv(cdiv(R, cdiv(R, most)), TILE_TOKENS) * TILE_TOKENS


def _buffer(tokens: int, V: int, like: torch.Tensor) -> torch.Tensor:
    """(tokens, V), each row beginning at a multiple of 128 bytes."""
    step = 128 // like.element_size()
    return like.new_empty(tokens, cdiv(V, step) * step)[:, :V]


def fused_pass(head: Head, need: Need) -> Gradients:
    """See passes.py. Gradients: hidden in the dtype of x; weight and bias in float32."""
    x, w, bias, labels = head.x, head.weight, head.bias, head.labels
    (R, H), V, wide = x.shape, w.shape[0], accumulator_dtype(x.dtype)
    loss = torch.empty(R, dtype=wide, device=x.device)
    lse = torch.empty_like(loss) if head.lse is None else head.lse
    dx = torch.empty_like(x) if need.hidden else None
    # the first chunk writes them
    make = torch.empty if R else torch.zeros
    dw = make(V, H, dtype=wide, device=x.device) if need.weight else None
    db = torch.zeros(V, dtype=wide, device=x.device) if need.bias else None

    size = chunk_tokens(R, V, x.element_size())
    buffer = _buffer(size, V, x)
    for start in range(0, R, size):
        part = slice(start, min(start + size, R))
        z = buffer[: part.stop - start]
        if bias is None:
            torch.mm(x[part], w.t(), out=z)
        else:
            torch.addmm(bias, x[part], w.t(), out=z)
        softmax_grad_(
            z, labels[part], loss[part], lse[part], head.settings,
            gradient=any(need), known=head.lse is not None,
            scale_R=None if head.scale is None else head.scale[part],
        )  # fmt: skip
        if dx is not None:
            torch.mm(z, w, out=dx[part])
        if dw is not None:
            product_into(dw, z.t(), x[part], first=start == 0)
        if db is not None:
            db += z.sum(0, dtype=wide)
    return Gradients(loss, lse, dx, dw, db)
