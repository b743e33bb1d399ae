"""What `torch.compile` does with an op inside a transform: it leaves the graph and runs the op eagerly.

Outside transforms an op is a node of the graph (opaque.py). Imported at trace time only: `import opake_kernels` does
not pay for the compiler. Leaves out `fullgraph=True` around transforms, which cannot be served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["outside_graph"]


@torch.compiler.disable(reason="opake_kernels: fused ops run outside compiled graphs")
def outside_graph(op: Callable[..., Any], *args: Any) -> Any:
    """`op(*args)`, eagerly, from code under compilation."""
    return op(*args)
