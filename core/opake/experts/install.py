"""`Experts` in place: Transformers' own dispatch of stacked experts leads to `opake_moe`, for the modules of one model.

The function is registered in Transformers' `ExpertsInterface` under one name; a module selects it through a config of
its own, a copy that differs in that name, so no other model is reached. Whatever implementation the user had set is
replaced, `eager` included; one that is set on the model afterwards is honoured. Expert parallelism, experts without a
gate or with a norm of their own, and quantised stacks stay with Transformers. Blocks that weigh what goes into their
experts are another file's (weighted.py).
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from opake import hf
from opake.patching.instance import untouched
from opake.patching.notes import note
from opake.patching.undo import Skip, Undo, put
from opake.transforms import inside_transform
from opake_kernels.moe import opake_moe

from . import adapters, weighted
from .eager import MARKS, products
from .gates import form, gate_of

if TYPE_CHECKING:
    from opake.records import Experts

NAME = "opake"
# on the module: its gate, its form, and whether paths other than dense may be taken
GATE, FORM, GROUPED = "_opake_gate", "_opake_gate_form", "_opake_grouped_moe"
# on the module's config: the config that it was copied from, and what that one selected then
ORIGIN, BEFORE = "_opake_origin", "_opake_before"


def fits(record: Experts, module: nn.Module) -> Skip | None:
    name = type(module).__name__
    if weighted.is_block(module):
        return weighted.fits(module)
    if not untouched(module, "forward"):
        return Skip(f"the forward of this {name} was replaced, and the replacement is kept", "stock")
    reason = _unlike(module)
    if reason is not None:
        return Skip(f"{name} {reason}; its experts stay with Transformers", "stock")
    if gate_of(module) is None:
        return Skip(f"{name} has a gate that opake_moe does not know; its experts stay with Transformers", "stock")
    return None


def apply(record: Experts, module: Any) -> Undo:
    if weighted.is_block(module):
        return weighted.apply(module)
    gate = gate_of(module)
    assert gate is not None, "checked by fits"
    hf.experts_functions()[NAME] = experts_forward
    config = copy.copy(module.config)
    vars(config).update({ORIGIN: module.config, BEFORE: hf.experts_name(module)})
    config._experts_implementation_internal = NAME
    own = [put(module, GATE, gate), put(module, FORM, form(module)), put(module, "config", config)]
    return Undo(own)


def remark(record: Experts, module: Any) -> str:
    """In place of which implementation, and what a trainable stack costs."""
    if weighted.is_block(module):
        return weighted.remark(module)
    size = sum(p.numel() * p.element_size() for p in module.parameters(recurse=False) if p.requires_grad)
    cost = f"; a gradient of its own for each example takes {size / 2**20:.4g} MiB an example" if size else ""
    return f"opake_moe in place of {hf.experts_name(module)}{cost}"


def axis_parameters(record: Experts, module: nn.Module) -> frozenset[str]:
    if not serves(module):
        return frozenset()
    return frozenset(name for name, _ in module.named_parameters(recurse=False))


def unregister() -> None:
    """Take our name out of the public table."""
    hf.experts_functions().pop(NAME, None)


def serves(module: nn.Module) -> bool:
    """Whether a call of these experts would be ours: they are patched, and nothing was changed since."""
    return GATE in vars(module) and not weighted.is_block(module) and _changed(module) is None


def experts_forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """hidden_states (T, H), chosen experts (T, K) and their weights (T, K) -> (T, H)."""
    index, weights = (*args, *kwargs.values())
    reason = _changed(self)
    if reason is not None:
        note(self, reason)
        return _other(self, hidden_states)(self, hidden_states, index, weights)
    gate = vars(self)[GATE]
    x = hidden_states.to(self.down_proj.dtype)
    x, index, weights, shape = adapters.by_example(self, x, index, weights)
    out = opake_moe(
        x,
        self.gate_up_proj,
        self.down_proj,
        index,
        weights,
        activation=gate.activation,
        grouped=vars(self).get(GROUPED, False),
        gate_up_bias=self.gate_up_proj_bias if self.has_bias else None,
        down_bias=self.down_proj_bias if self.has_bias else None,
        interleaved=gate.paired,
        transposed=self.is_transposed,
        lora_gate_up=adapters.given(self, "gate_up_proj"),
        lora_down=adapters.given(self, "down_proj"),
    )
    return out.reshape(shape).to(hidden_states.dtype)


def _changed(self: Any) -> str | None:
    """What was changed since patching, so that Transformers' own functions run; None as a rule."""
    chosen = _set_since(self)
    if chosen is not None:
        return f"experts implementation {chosen!r} was set after patching: it runs"
    if form(self) != vars(self)[FORM]:
        return "the gate was changed after patching: Transformers' grouped products run"
    return None


def _set_since(self: Any) -> str | None:
    """The implementation that the model's config selects, if that is another than at patching."""
    now = getattr(vars(self.config)[ORIGIN], "_experts_implementation", None)
    # inside transforms `eager` cannot run, and ours does in its place
    same = now in (vars(self.config)[BEFORE], NAME) or (now == "eager" and inside_transform())
    return None if same else str(now)


def _other(self: Any, hidden: torch.Tensor) -> Any:
    """The function that runs instead of ours."""
    chosen = _set_since(self)
    return products(hidden) if chosen is None else hf.experts_functions().get(chosen) or hf.eager_experts(type(self))


def _unlike(module: Any) -> str | None:
    """Why the experts of this module are not those that the op computes, or None."""
    if not all(hasattr(module, mark) for mark in MARKS):
        return "is not dispatched by Transformers' experts interface"
    if not module.has_gate:
        return "has no gate"
    if getattr(module, "has_post_expert_norm", False):
        return "normalises the output of each expert"
    if getattr(module, "_is_expert_parallel", False):
        return "is spread over devices"
    wanted = {"gate_up_proj", "down_proj"} | ({"gate_up_proj_bias", "down_proj_bias"} if module.has_bias else set())
    held = dict(module.named_parameters(recurse=False))
    if held.keys() != wanted:
        return f"has the parameters {', '.join(sorted(held))}, not {', '.join(sorted(wanted))}"
    kinds = {parameter.dtype for parameter in held.values()}
    if len(kinds) > 1 or not all(kind.is_floating_point and kind.itemsize > 1 for kind in kinds):
        return f"keeps its weights in {', '.join(sorted(map(str, kinds)))}"
    return None
