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

Place = tuple[str, ...]
Snapshot = dict[Place, Any]
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
    seen: set[int] = set()
    for name in modules:
        for key, value in list(vars(sys.modules[name]).items()):
            if key == "__warningregistry__" or isinstance(value, types.ModuleType):
                continue
            found[name, key] = value
            # many modules import the same class or table
            if isinstance(value, dict | type) and id(value) not in seen:
                seen.add(id(value))
                _note_contents(found, (name, key), value)
    return found


def _is_theirs(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES


def _note_contents(found: Snapshot, place: Place, value: dict[Any, Any] | type) -> None:
    if isinstance(value, dict):
        _note_entries(found, place, value)
    elif _is_theirs(value.__module__):
        place = (value.__module__, value.__qualname__)
        for key, attribute in list(vars(value).items()):
            if key == "__slotnames__" or key.endswith("_cached_value"):
                # what `copy` and Transformers remember about a class when it is first used, by whomever
                continue
            found[(*place, key)] = attribute
            if isinstance(attribute, dict):
                _note_entries(found, (*place, key), attribute)


def _note_entries(found: Snapshot, place: Place, mapping: dict[Any, Any]) -> None:
    # the raw entries: a lazy mapping of Transformers would import whatever it is asked for
    for key, value in list(dict.items(mapping)):
        if not str(key).startswith(OURS):
            found[(*place, str(key))] = value


def model_snapshot(model: torch.nn.Module) -> Snapshot:
    """Every attribute of every submodule, every entry of its dictionaries (hooks too), and its configs' attributes."""
    found: Snapshot = {}
    for name, module in model.named_modules():
        _note_object(found, name or "model", module)
        found[name or "model", "__class__"] = type(module)
    for index, config in enumerate(hf.configs(getattr(model, "config", None))):
        _note_object(found, f"config{index}", config)
    return found


def _note_object(found: Snapshot, name: str, owner: object) -> None:
    for key, value in vars(owner).items():
        found[name, key] = value
        if isinstance(value, dict):
            found.update({(name, key, str(k)): v for k, v in value.items()})


def differences(before: Snapshot, after: Snapshot) -> Iterator[str]:
    """What was replaced, removed or added, in words."""
    for place, value in before.items():
        now = after.get(place, _GONE)
        if now is _GONE:
            yield f"{'.'.join(place)} is gone"
        elif now is not value:
            yield f"{'.'.join(place)} was {value!r:.120} and is {now!r:.120}"
    for place, value in after.items():
        if place not in before:
            yield f"{'.'.join(place)} is new: {value!r:.120}"


_GONE = object()
