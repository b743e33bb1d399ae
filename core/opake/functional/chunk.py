"""What an engine returns for the rows of one microbatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from opake.functional.rows import Rows


class Chunk(NamedTuple):
    """grads `{name: (b, *shape)}` in the parameters' dtypes, losses (b,), and aux with a leading b."""

    grads: dict[str, torch.Tensor]
    losses: torch.Tensor
    aux: Any


Engine = Callable[[Mapping[str, torch.Tensor], Rows], Chunk]
