"""Whether fused kernels can run here, in words."""

from __future__ import annotations

import importlib.util


def no_kernels_because() -> str | None:
    """None where CUDA and Triton are usable, else the reason, e.g. `no CUDA device`."""
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return None
