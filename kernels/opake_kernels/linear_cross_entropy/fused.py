"""Back end for CUDA: whole rows of logits for a chunk of tokens at a time, in a buffer that holds nothing for long.

A chunk is two matrix products of the vendor's library with one Triton launch between them, which turns the logits into
their gradient where they lie: the fewest products that a frozen head allows. Chunks are wide enough to fill the device
and small enough that the buffer is a fraction of what is saved. The second product is summed in float32: over a whole
vocabulary the library may otherwise add up rounded parts. Leaves out groups and reduction (op.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from opake_kernels.launch import cdiv

from .exp_rows import exp_rows_, finish_rows
from .passes import Gradients, Head, Need, accumulator_dtype, product_into
from .softmax_grad import softmax_grad_

__all__ = ["BUFFER_BYTES", "TILE_TOKENS", "chunk_tokens", "fused_pass"]

# what the logits of a chunk may take (twice that where the sum for the weight, larger still, is read and written with
# every chunk), and the tile of the matrix unit in tokens
BUFFER_BYTES = 256 * 2**20
TILE_TOKENS = 128


def chunk_tokens(R: int, V: int, element_size: int, weight: bool = False) -> int:
    """Tokens in a chunk: what the budget holds, in multiples of the matrix unit's tile, shared out evenly.

    weight: whether a gradient of the weight is summed over the chunks.
    """
    most = BUFFER_BYTES * (2 if weight else 1)
    most = max(most // (V * element_size) // TILE_TOKENS * TILE_TOKENS, TILE_TOKENS)
    if most >= R:
        return max(R, 1)
    return cdiv(cdiv(R, cdiv(R, most)), TILE_TOKENS) * TILE_TOKENS


def _buffer(tokens: int, V: int, like: torch.Tensor) -> torch.Tensor:
    """(tokens, V), each row beginning at a multiple of 128 bytes."""
    step = 128 // like.element_size()
    return like.new_empty(tokens, cdiv(V, step) * step)[:, :V]


def fused_pass(head: Head, need: Need) -> Gradients:
    """See passes.py. Gradients: hidden in the dtype of x; weight and bias in float32."""
    frozen = need == (True, False, False) and head.scale is None
    return _one_read(head) if frozen and head.settings.smoothing == 0.0 else _two_reads(head, need)


def _sums(tokens: int, H: int, like: torch.Tensor) -> torch.Tensor:
    """(tokens, H) for the second product of a chunk, before it is rounded."""
    return torch.empty(tokens, H, dtype=accumulator_dtype(like.dtype), device=like.device)


def _chunks(head: Head, size: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """(`size` tokens, their logits in a buffer that the next chunk takes over)."""
    x, w, bias = head.x, head.weight, head.bias
    R, V = x.shape[0], w.shape[0]
    buffer = _buffer(size, V, x)
    for start in range(0, R, size):
        rows = slice(start, min(start + size, R))
        z = buffer[: rows.stop - start]
        if bias is None:
            torch.mm(x[rows], w.t(), out=z)
        else:
            torch.addmm(bias, x[rows], w.t(), out=z)
        yield rows, z


def _one_read(head: Head) -> Gradients:
    """A frozen head: the softmax is normalised after the second product (exp_rows.py)."""
    x, w, labels = head.x, head.weight, head.labels
    R, H = x.shape
    loss, factor, label = torch.empty(3, R, dtype=torch.float32, device=x.device).unbind()
    dx = torch.empty(R, H, dtype=x.dtype, device=x.device)
    size = chunk_tokens(R, w.shape[0], x.element_size())
    product = _sums(size, H, x)
    for rows, z in _chunks(head, size):
        exp_rows_(z, labels[rows], loss[rows], factor[rows], label[rows], head.settings)
        part = product[: len(z)]
        product_into(part, z, w, first=True)
        finish_rows(part, dx[rows], w, labels[rows], factor[rows], label[rows])
    return Gradients(loss, dx)


def _two_reads(head: Head, need: Need) -> Gradients:
    x, w = head.x, head.weight
    (R, H), V, wide = x.shape, w.shape[0], accumulator_dtype(x.dtype)
    loss = torch.empty(R, dtype=wide, device=x.device)
    dx = torch.empty(R, H, dtype=x.dtype, device=x.device) if need.hidden else None
    size = chunk_tokens(R, V, x.element_size(), need.weight)
    product = None if dx is None or wide == x.dtype else _sums(size, H, x)
    # the first chunk writes it
    make = torch.empty if R else torch.zeros
    dw = make(V, H, dtype=wide, device=x.device) if need.weight else None
    db = torch.zeros(V, dtype=wide, device=x.device) if need.bias else None
    for rows, z in _chunks(head, size):
        softmax_grad_(
            z, head.labels[rows], loss[rows], head.settings, gradient=any(need),
            scale_R=None if head.scale is None else head.scale[rows],
        )  # fmt: skip
        if dx is not None:
            part = dx[rows] if product is None else product[: len(z)]
            product_into(part, z, w, first=True)
            if product is not None:
                dx[rows] = part
        if dw is not None:
            product_into(dw, z.t(), x[rows], first=rows.start == 0)
        if db is not None:
            db += z.sum(0, dtype=wide)
    return Gradients(loss, dx, dw, db)
