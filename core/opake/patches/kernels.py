"""The stand-alone fused ops, each usable without any model: the documented face of `opake_kernels`.

Every op works plain, in autograd and under any nesting of `torch.func.vmap` and `grad`; CPU and machines without Triton
take a plain PyTorch twin of the same meaning. Importing this file imports torch.
"""

from __future__ import annotations

import opake_kernels
from opake_kernels import *  # noqa: F403

__all__ = opake_kernels.__all__  # pyright: ignore[reportUnsupportedDunderAll]
