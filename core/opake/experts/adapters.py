"""LoRA on stacked experts, handed to the experts for the length of one call instead of being put into their weights.

PEFT keeps the factors of all experts in two linear layers; here they become (E, in, r) and (E, r, out), and the op adds
x A_e B_e to each product. The sum of weight and adapter, which is as large as the stack, is never formed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

_KEY = "_opake_adapters"
SERVED = ("gate_up_proj", "down_proj")


def takes(module: nn.Module, parameter: str) -> bool:
    """Whether adapters of this parameter may be handed over: its experts are ours, in this call too."""
    from .install import serves

    return parameter in SERVED and serves(module)


@contextlib.contextmanager
def handed(module: nn.Module, parameter: str, adapter: tuple[torch.Tensor, torch.Tensor, float]) -> Iterator[None]:
    """`adapter` (A, B, scaling) belongs to `parameter` of the experts inside the block."""
    state = vars(module)
    before = state.get(_KEY)
    state[_KEY] = {**(before or {}), parameter: adapter}
    try:
        yield
    finally:
        if before is None:
            del state[_KEY]
        else:
            state[_KEY] = before


def given(module: nn.Module, parameter: str) -> tuple[torch.Tensor, torch.Tensor, float] | None:
    """The adapter of a parameter in this call."""
    return vars(module).get(_KEY, {}).get(parameter)


def factors(wrapper: Any, names: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(A (E, in, r), B (E, r, out), 1.0) of a wrapper's adapters, those of several side by side.

    With an example axis on PEFT's layers, A and B have it in front.
    """
    pairs = [_factors(wrapper, name) for name in names]
    if len(pairs) == 1:
        return (*pairs[0], float(wrapper.scaling[names[0]]))
    scaled = [B * wrapper.scaling[name] for (_, B), name in zip(pairs, names, strict=True)]
    return torch.cat([A for A, _ in pairs], dim=-1), torch.cat(scaled, dim=-2), 1.0


def _factors(wrapper: Any, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    E, owner = wrapper.num_experts, wrapper.get_base_layer()
    # (E * r, in) with r counted first, and (out, r * E) with the expert counted first
    A = wrapper.lora_A[name].weight.unflatten(-2, (E, -1)).mT
    B = wrapper.lora_B[name].weight.unflatten(-1, (-1, E)).movedim(-1, -3).mT
    # "in" is the first matrix dimension of the parameter, unless PEFT has turned it to what the experts read
    reads_in = owner.is_transposed or getattr(wrapper, "_did_swap_in_out_features", False)
    return (A, B) if reads_in else (B.mT, A.mT)


def by_example(
    module: Any, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Size]:
    """x, index and weights with the example axis that the weights of this call have, and the shape of the result."""
    shape = x.shape
    stacks = [stack for stack in (module.gate_up_proj, module.down_proj) if stack.dim() == 4]
    low_rank = [A for A, _, _ in vars(module).get(_KEY, {}).values() if A.dim() == 4]
    if not stacks and not low_rank:
        return x, index, weights, shape
    B = (stacks or low_rank)[0].shape[0]
    return x.unflatten(0, (B, -1)), index.unflatten(0, (B, -1)), weights.unflatten(0, (B, -1)), shape
