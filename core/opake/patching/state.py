"""What is applied to one model: kept on the model itself, so that a deep copy knows about its own patches."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .report import PatchReport
from .undo import MISSING, Undo

if TYPE_CHECKING:
    from torch import nn

    from opake.records import Record

_KEY = "_opake"
_live: weakref.WeakSet[ModelState] = weakref.WeakSet()


@dataclass(slots=True)
class Applied:
    """One record at one module, with its undo."""

    record: Record
    site: str
    module: nn.Module
    undo: Undo


@dataclass(slots=True, eq=False, weakref_slot=True)
class ModelState:
    """The applied records of a model, oldest first, the flag values and the report of the last call."""

    applied: list[Applied] = field(default_factory=list)
    report: PatchReport | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _live.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelState:
        from copy import deepcopy

        new = ModelState(report=self.report, options=dict(self.options))
        memo[id(self)] = new
        new.applied = deepcopy(self.applied, memo)
        return new

    def __getstate__(self) -> None:
        raise TypeError(
            "a patched model cannot be pickled whole; save model.state_dict() or use save_pretrained, "
            "or call opake.patches.restore(model) first"
        )

    def find(self, record: Record, module: nn.Module) -> Applied | None:
        for entry in self.applied:
            if entry.module is module and entry.record == record:
                return entry
        return None


def state_of(model: nn.Module) -> ModelState | None:
    """The state of an innermost model, None if it was never patched."""
    return vars(model).get(_KEY)


def open_state(model: nn.Module) -> ModelState:
    """The state of an innermost model, made if need be."""
    return vars(model).setdefault(_KEY, ModelState())


def close_state(model: nn.Module) -> None:
    """Forget the state of a model to which nothing is applied any more."""
    state = vars(model).pop(_KEY, None)
    if state is not None:
        _live.discard(state)


def any_live() -> bool:
    """Whether any model in the process, a deep copy included, is still patched."""
    if not any(state.applied for state in _live):
        return False
    # a model that nobody can reach any more is in cycles with its own modules, and so perhaps not collected yet
    gc.collect()
    return any(state.applied for state in _live)


def axis_parameters(model: nn.Module) -> dict[str, str]:
    """Qualified names (in `model`) of parameters that a patched op takes with an example axis, with the op's record."""
    state = state_of(model)
    if state is None:
        return {}
    return {
        f"{entry.site}.{name}" if entry.site else name: str(entry.record)
        for entry in state.applied
        for name in entry.record.axis_parameters(entry.module)
    }


def _watched(module: nn.Module) -> bool:
    """Whether hooks of others run around the module; those by which Transformers records outputs change nothing."""
    from opake import hf
    from opake.checkpoint.model import GuardedHook

    state = vars(module)
    if state["_forward_pre_hooks"] or state["_backward_hooks"] or state["_backward_pre_hooks"]:
        return True
    after = state["_forward_hooks"].values()
    return any(not isinstance(hook, GuardedHook) and not hf.records_outputs(hook) for hook in after)


def _foreign_forwards(model: nn.Module, state: ModelState) -> set[int]:
    """Ids of modules with a forward of their own that is not ours, on top of ours or beneath it."""
    changes = [c for entry in state.applied for c in entry.undo.changes if c.key == "forward" and c.container is None]
    ours = {id(change.ours) for change in changes}
    beneath = {id(c.owner) for c in changes if c.before is not MISSING and id(c.before) not in ours}
    own = ((id(module), vars(module).get("forward")) for module in model.modules())
    theirs = {m for m, forward in own if forward is not None and id(forward) not in ours and not _policy(forward)}
    return beneath | theirs


def _policy(forward: object) -> bool:
    """Whether this is a forward that `opake.checkpoint` runs again in the backward."""
    return getattr(getattr(forward, "__func__", None), "opake_policy", False)


def row_independent(model: nn.Module) -> str | None:
    """Why the rows of one ordinary batch might reach each other in this model; None if they provably do not.

    Asked of shapes, settings and applied records only. Attention either has our masks, or is eager and has the additive
    ones of Transformers, which are made for every row whatever the others say.
    """
    from torch import nn

    from opake import hf
    from opake.batching import rotary

    name, state = type(model).__name__, state_of(model)
    if state is None or state.report is None:
        return f"{name} is not patched"
    if state.report.family == "generic":
        return f"{name} has no family plugin, so nothing vouches for its rows"
    masked = any(type(entry.record).__name__ == "Masking" for entry in state.applied)
    if not masked and hf.attention_name(model) != "eager":
        return "vmap_masking is off, and stock masks are chosen by what the whole batch says"
    if any(getattr(config, "output_router_logits", False) for config in hf.configs(model.config)):
        return "output_router_logits is on, and the auxiliary loss of a router counts over all rows of a batch"
    foreign = _foreign_forwards(model, state)
    for site, module in model.named_modules():
        if _watched(module) or id(module) in foreign:
            return f"{site or name} has a hook or a forward that somebody put there, which may see the whole batch"
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return f"{site} is a {type(module).__name__}, which mixes the rows of a batch"
        if rotary.updates(module):
            return f"the rotary tables of {site} depend on the longest row of a batch"
    return None
