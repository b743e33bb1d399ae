"""Blocks that weigh what goes into their experts instead of what comes out (Llama 4), computed sparsely.

Stock sends every token, times its score, through every expert; the scores of experts that were not chosen are zero, and
so is what an expert makes of a row of zeros. Here a token goes to those it chose. Each choice is a token of its own for
`opake_moe`, with one expert and weight one. Leaves out adapters on the stacks: with them the stock block runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from opake.patching.instance import untouched, wrap_method
from opake.patching.notes import note
from opake.patching.undo import Skip, Undo, put
from opake.rows.gated_mlp import activation_of
from opake.rows.probe import interfered
from opake_kernels.moe import opake_moe

from .gates import form

PARTS = ("experts", "router", "shared_expert")
STACKS = {"gate_up_proj", "down_proj"}
ACTIVATION, FORM, GROUPED = "_opake_gate", "_opake_gate_form", "_opake_grouped_moe"


def is_block(module: nn.Module) -> bool:
    """Whether this is such a block: the only kind whose experts are called with a single tensor."""
    held = module._modules
    return all(part in held for part in PARTS) and not hasattr(held["experts"], "_apply_gate")


def fits(module: Any) -> Skip | None:
    name, experts = type(module).__name__, module.experts
    if not untouched(module, "forward") or interfered(experts):
        return Skip(f"the forward of this {name} or of its experts was replaced or hooked, and is kept", "stock")
    if experts._parameters.keys() != STACKS or experts.gate_up_proj.dim() != 3:
        return Skip(f"{name} holds {', '.join(sorted(experts._parameters)) or 'no stacks'}; it stays as it is", "stock")
    kinds = {p.dtype for p in experts.parameters()}
    if len(kinds) > 1 or not all(kind.is_floating_point and kind.itemsize > 1 for kind in kinds):
        return Skip(f"{name} keeps its weights in {', '.join(sorted(map(str, kinds)))}; it stays as it is", "stock")
    if interfered(getattr(experts, "act_fn", None)) or activation_of(experts) is None:
        return Skip(f"{name} has an activation that opake_moe does not know; it stays as it is", "stock")
    return None


def apply(module: Any) -> Undo:
    experts = module.experts
    found = [put(module, ACTIVATION, activation_of(experts)), put(module, FORM, form(experts))]
    return Undo([*found, wrap_method(module, "forward", _forward)])


def remark(module: Any) -> str:
    stacks = [p for p in module.experts.parameters() if p.requires_grad]
    size = sum(p.numel() * p.element_size() for p in stacks)
    cost = f"; a gradient of its own for each example takes {size / 2**20:.4g} MiB an example" if size else ""
    return f"opake_moe in place of every expert for every token{cost}"


def _changed(self: Any, experts: Any) -> str | None:
    """Why the block is not the one that was patched."""
    if experts._parameters.keys() != STACKS:
        return "the experts have adapters"
    if interfered(experts):
        return "the experts have hooks"
    if form(experts) != vars(self)[FORM]:
        return "the activation was changed after patching"
    return None


def _forward(inner: Callable[..., Any], self: Any, hidden_states: torch.Tensor) -> Any:
    experts = self.experts
    reason = _changed(self, experts)
    if reason is not None:
        note(self, f"{reason}: the stock block runs")
        return inner(self, hidden_states)
    x = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(x)
    weights, index = scores.topk(self.top_k, dim=1)
    slots = (x[:, None] * weights[..., None]).flatten(0, 1)
    routed = opake_moe(
        slots,
        experts.gate_up_proj,
        experts.down_proj,
        index.reshape(-1, 1),
        slots.new_ones(slots.shape[0], 1),
        activation=vars(self)[ACTIVATION],
        grouped=vars(self).get(GROUPED, False),
        transposed=True,
    )
    return self.shared_expert(x) + routed.unflatten(0, (-1, self.top_k)).sum(1), logits
