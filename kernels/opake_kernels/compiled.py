"""What `torch.compile` does with an op: it leaves the graph, runs the op eagerly and goes on with a new graph.

Imported at trace time only: `import opake_kernels` does not pay for the compiler. A kernel of ours is one launch
already; what a graph break costs is the fusion of its neighbours. Leaves out `fullgraph=True`, which cannot be served.
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
