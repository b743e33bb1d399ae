"""The paths that installed experts take: dense alone, or what the shapes of a call ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from opake.patching.undo import Undo, put
from opake_kernels.moe import NAMES_OF_PATHS, choose

from .install import GATE, GROUPED
from .weighted import is_block

# how configs call the number of experts that a token takes
CHOICES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k")


def sites(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if GATE in vars(module):
            yield name, module


def apply(module: nn.Module) -> Undo:
    return Undo([put(module, GROUPED, True)])


def remark(module: Any) -> str:
    """The path of a call where the weights are now, and why."""
    block = is_block(module)
    down = module.experts.down_proj if block else module.down_proj
    E, *sizes = down.shape
    I, H = sizes if block or module.is_transposed else reversed(sizes)
    path, why = choose(down.device, down.dtype, E, 1 if block else _choices(module), I, H)
    return f"{NAMES_OF_PATHS[path]}: {why}"


def _choices(module: Any) -> int:
    found = next((value for name in CHOICES if (value := getattr(module.config, name, None)) is not None), 1)
    # one number a layer in some configs
    return max(found) if isinstance(found, list | tuple) else int(found)
