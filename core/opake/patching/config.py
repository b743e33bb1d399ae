"""Give a model a config of its own, so that selecting an implementation on it reaches no other model.

Two models built from one config object share it. On restore the original object returns to every place it was taken
from, and what the user changed on the model's config meanwhile is carried over to it: nothing is lost.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from opake import hf

from .undo import Undo, put

if TYPE_CHECKING:
    from torch import nn

OURS = "opake"
IMPLEMENTATIONS = ("_attn_implementation_internal", "_experts_implementation_internal")


def own_config(model: nn.Module, wrappers: tuple[nn.Module, ...] = ()) -> Undo:
    """Replace the config of `model`, in every submodule and wrapper that holds it, by a copy."""
    memo: dict[int, Any] = {}
    copy.deepcopy(model.config, memo)
    twins = {id(old): (old, memo[id(old)]) for old in hf.configs(model.config)}
    changes = []
    for module in _modules(model, wrappers):
        for name, value in list(vars(module).items()):
            if id(value) in twins:
                changes.append(put(module, name, twins[id(value)][1]))
    pairs = [(old, new, _plain(new)) for old, new in twins.values()]
    return Undo(changes, carry_over, (pairs,))


def carry_over(pairs: list[tuple[Any, Any, dict[str, Any]]]) -> None:
    """Set on each original what was changed on its copy since the copy was made, our implementations excepted."""
    for old, new, snapshot in pairs:
        for key, value in _plain(new).items():
            ours = key in IMPLEMENTATIONS and str(value).startswith(OURS)
            if not ours and (key not in snapshot or value != snapshot[key]):
                vars(old)[key] = value


def settled(undo: Undo) -> Undo:
    """The undo of `own_config` after more was set on the copies: what stands there now is no change of the user's."""
    undo.args = ([(old, new, _plain(new)) for old, new, _ in undo.args[0]],)
    return undo


def _modules(model: nn.Module, wrappers: tuple[nn.Module, ...]) -> list[nn.Module]:
    found = {id(module): module for root in (*wrappers, model) for module in root.modules()}
    return list(found.values())


def _plain(config: Any) -> dict[str, Any]:
    nested = {id(inner) for inner in hf.configs(config)}
    return copy.deepcopy({key: value for key, value in vars(config).items() if id(value) not in nested})
