"""Per-example gradients and what they need: a functional model, a batch dimension for single rows, clipping, remat."""

from __future__ import annotations

from opake.checkpoint import remat
from opake.functional.batch_dim import with_batch_dim
from opake.functional.clipped import ClippedGrad, clipped_grad
from opake.functional.module import make_functional
from opake.functional.per_example import per_example_grads

__all__ = [
    "ClippedGrad",
    "clipped_grad",
    "make_functional",
    "per_example_grads",
    "remat",
    "with_batch_dim",
]
