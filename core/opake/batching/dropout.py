"""Dropout set to zero until restore: in `nn.Dropout` modules, in the plain numbers that attention modules keep, and in
the config where a forward reads its probability from there each time.
"""

from __future__ import annotations

import dis
import functools
import itertools

from torch import nn

from opake import hf
from opake.patching.config import own_config, settled
from opake.patching.instance import layers
from opake.patching.undo import Undo, put

KINDS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def apply(model: nn.Module, wrappers: tuple[nn.Module, ...] = ()) -> Undo:
    named = {key for module in model.modules() for key in _from_config(module)}
    # another model may hold the same config
    undo = own_config(model, wrappers) if named else Undo([])
    changes = [
        put(config, key, 0.0, where=f"config.{key}")
        for config in (hf.configs(model.config) if named else ())
        for key in sorted(named)
        if isinstance(vars(config).get(key), (int, float)) and vars(config)[key] != 0
    ]
    for name, module in model.named_modules():
        numbers = ["p"] if isinstance(module, KINDS) else _probabilities(module)
        for key in numbers:
            if vars(module)[key] != 0:
                changes.append(put(module, key, 0.0, where=f"{name}.{key}"))
    undo.changes += changes
    return settled(undo) if named else undo


def active(model: nn.Module) -> bool:
    """Whether any module would drop something if it ran now."""
    for module in model.modules():
        names = ["p"] if isinstance(module, KINDS) else _probabilities(module)
        if module.training and (any(vars(module)[name] != 0 for name in names) or any(_from_config(module))):
            return True
    return False


def _from_config(module: nn.Module) -> list[str]:
    """Probabilities above zero that the forward of `module` reads from its config each time."""
    config = vars(module).get("config")
    if config is None:
        return []
    return [key for key in _read(type(module)) if vars(config).get(key)]


@functools.cache
def _read(cls: type[nn.Module]) -> tuple[str, ...]:
    """Names of probabilities that the forward takes as `....config.name`."""
    found = []
    for fn in layers(cls.forward):
        steps = list(dis.get_instructions(fn))
        pairs = ((a.argval, b.argval) for a, b in itertools.pairwise(steps) if b.opname == "LOAD_ATTR")
        found += [name for owner, name in pairs if owner == "config" and _is_probability(name)]
    return tuple(dict.fromkeys(found))


def _probabilities(module: nn.Module) -> list[str]:
    """Attributes such as `attention_dropout` or `layerdrop` that hold a probability."""
    return [key for key, value in vars(module).items() if isinstance(value, float) and _is_probability(key)]


def _is_probability(name: str) -> bool:
    return name.endswith(("dropout", "_pdrop", "dropout_prob", "dropout_p")) or name == "layerdrop"
