"""What there is, object by object, before something happens and after it: modules, classes, registries, models.

Two snapshots are compared with `is`, never with `==`: a patch that was taken back by an equal object was not taken
back. The objects are kept alive, so that an identity is not given to a newcomer.
"""

# ruff: noqa: TID253
from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from opake import hf

Snapshot = dict[str, Any]
OURS = "opake"


PACKAGES = ("transformers", "peft")


def imported() -> list[str]:
    """Names of the modules of Transformers and PEFT that are imported."""
    return sorted(name for name, module in sys.modules.items() if _is_theirs(name) and module is not None)


def library_snapshot(modules: Iterable[str]) -> Snapshot:
    """Every attribute of these modules and of every class of the libraries they hold, and entries of dictionaries.

    Keys of our own in a dictionary (public registries) are left out: they are allowed.
    """
    found: Snapshot = {}
    for name in modules:
        _note_module(found, name, sys.modules[name])
    return found


def _is_theirs(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES


def _note_module(found: Snapshot, name: str, module: types.ModuleType) -> None:
    for key, value in list(vars(module).items()):
        if key == "__warningregistry__" or isinstance(value, types.ModuleType):
            continue
        found[f"{name}.{key}"] = value
        if isinstance(value, dict):
            found.update(_entries(f"{name}.{key}", value))
        elif isinstance(value, type) and _is_theirs(value.__module__):
            _note_class(found, f"{value.__module__}.{value.__qualname__}", value)


def _note_class(found: Snapshot, name: str, cls: type) -> None:
    for key, value in list(vars(cls).items()):
        found[f"{name}.{key}"] = value
        if isinstance(value, dict):
            found.update(_entries(f"{name}.{key}", value))


def _entries(name: str, mapping: dict[Any, Any]) -> Snapshot:
    # the raw entries: a lazy mapping of Transformers would import whatever it is asked for
    return {f"{name}[{key!r}]": value for key, value in list(dict.items(mapping)) if not str(key).startswith(OURS)}


def model_snapshot(model: torch.nn.Module) -> Snapshot:
    """Every attribute of every submodule, every entry of its dictionaries (hooks too), and its configs' attributes."""
    found: Snapshot = {}
    for name, module in model.named_modules():
        found.update(_object(f"{name or 'model'}", module))
        found[f"{name or 'model'}.__class__"] = type(module)
    for index, config in enumerate(hf.configs(getattr(model, "config", None))):
        found.update(_object(f"config{index}", config))
    return found


def _object(name: str, owner: object) -> Snapshot:
    found: Snapshot = {}
    for key, value in vars(owner).items():
        found[f"{name}.{key}"] = value
        if isinstance(value, dict):
            found.update({f"{name}.{key}[{k!r}]": v for k, v in value.items()})
    return found


def differences(before: Snapshot, after: Snapshot) -> Iterator[str]:
    """What was replaced, removed or added, in words."""
    for name in before.keys() & after.keys():
        if before[name] is not after[name]:
            yield f"{name} was {before[name]!r:.120} and is {after[name]!r:.120}"
    for name in before.keys() - after.keys():
        yield f"{name} is gone"
    for name in after.keys() - before.keys():
        yield f"{name} is new: {after[name]!r:.120}"
