"""Which layers a pattern names: exact names, name endings, wildcards, regular expressions, or every linear layer.

Only names and classes are looked at; what is put on a layer is decided elsewhere.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from torch import nn

from opake.errors import InputError

from .shapes import is_conv1d, is_linear_map
from .wrapper import AdapterWrapper

Target = str | re.Pattern[str]
Value = TypeVar("Value")
ALL_LINEAR = "all-linear"
WILD = re.compile(r"[*?\[]")
ROUTERS = ("gate", "router")
ROUTER_CLASSES = ("Router", "Gate", "Gating")


def matches(name: str, target: Target) -> bool:
    """Whether `target` names the module `name`.

    A string is the whole name or its ending after a dot; with `*`, `?` or `[` it is a wildcard for either. A compiled
    pattern must match the whole name.
    """
    if isinstance(target, re.Pattern):
        return target.fullmatch(name) is not None
    if WILD.search(target):
        return fnmatchcase(name, target) or fnmatchcase(name, f"*.{target}")
    return name == target or name.endswith(f".{target}")


def first_naming(names: Sequence[str], patterns: Mapping[Target, Value]) -> Target | None:
    """The first pattern that gives a layer with these names its value; None if no pattern names it."""
    return next((each for each in patterns if any(matches(name, each) for name in names)), None)


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of everything that may get an adapter or has one; nothing inside an adapter's wrapper."""
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules(remove_duplicate=False):
        if name.startswith(inside) and inside:
            continue
        if isinstance(module, AdapterWrapper):
            inside = (*inside, f"{name}.")
        if name:
            yield name, module


def select(
    model: nn.Module, targets: Sequence[Target], exclude: Sequence[Target], served: Sequence[Target] = ()
) -> dict[str, nn.Module]:
    """The modules that the targets name and no exclusion does.

    Raises:
        InputError: a target that names nothing, unless it is `served` otherwise, with the nearest names.
    """
    if not targets:
        raise InputError("targets is empty, so no layer would get an adapter; name some, or pass 'all-linear'")
    known = dict(candidates(model))
    found: dict[str, nn.Module] = {}
    for target in targets:
        named = {name: module for name, module in known.items() if named_by(name, module, target, model)}
        if not named and target not in served:
            raise names_nothing(model, target, known)
        found |= {name: m for name, m in named.items() if not any(matches(name, each) for each in exclude)}
    _require_alone(known, found, exclude)
    if not found and not served:
        raise InputError(f"every module that {', '.join(map(shown, targets))} names is excluded")
    return found


def _require_alone(known: Mapping[str, nn.Module], found: Mapping[str, nn.Module], exclude: Sequence[Target]) -> None:
    """Raise InputError for a layer that stands at several places, of which only some are excluded."""
    names = {id(module): name for name, module in found.items()}
    for name, module in known.items():
        if id(module) in names and any(matches(name, each) for each in exclude):
            raise InputError(
                f"{name} is excluded and is the same layer as {names[id(module)]}; exclude both or neither"
            )


def as_targets(value: Any, what: str) -> list[Target]:
    """One target or several as a list; InputError for anything else."""
    several = [value] if isinstance(value, str | re.Pattern) else value
    if isinstance(several, Sequence | set | frozenset) and all(isinstance(each, str | re.Pattern) for each in several):
        return list(several)
    raise InputError(f"{what}={value!r:.80}: it takes names, wildcards or compiled patterns, one or a list of them")


def as_patterns(value: Any, what: str) -> dict[Target, Any]:
    """Values for single layers by what names them; InputError for anything but a mapping."""
    found = {} if value is None else value
    if isinstance(found, Mapping) and all(isinstance(each, str | re.Pattern) for each in found):
        return dict(found)
    raise InputError(
        f"{what}={value!r:.80}: it takes a mapping from names, wildcards or compiled patterns to values, "
        'e.g. {"q_proj": 16}'
    )


def names_nothing(model: nn.Module, target: Target, known: Mapping[str, nn.Module], what: str = "") -> InputError:
    """The error of a target that names no module, with the nearest name."""
    return InputError(f"{what}no module of {type(model).__name__} is named by {shown(target)}{_hint(target, known)}")


def is_router_name(name: str) -> bool:
    """Whether a module of this name routes tokens to experts."""
    return name.rpartition(".")[2] in ROUTERS


def named_by(name: str, module: nn.Module, target: Target, model: nn.Module) -> bool:
    """Whether `target`, `"all-linear"` included, is about this module."""
    if target != ALL_LINEAR:
        return matches(name, target)
    return module is not _head_of(model) and not _routes(name, model) and is_linear_map(module)


def _routes(name: str, model: nn.Module) -> bool:
    """Whether a layer is a router or a part of one, by the names and classes on the way to it."""
    if "router" in name.rpartition(".")[2].split("_"):
        return True
    steps = name.split(".")
    above = [".".join(steps[:i]) for i in range(1, len(steps))]
    classes = [type(model.get_submodule(each)).__name__ for each in above]
    return any(map(is_router_name, [*above, name])) or any(each.endswith(ROUTER_CLASSES) for each in classes)


def _head_of(model: nn.Module) -> nn.Module | None:
    probe: Callable[[], Any] | None = getattr(model, "get_output_embeddings", None)
    return probe() if callable(probe) else None


def shown(target: Target) -> str:
    """A target as it is written in messages."""
    return repr(target.pattern) if isinstance(target, re.Pattern) else repr(target)


def _hint(target: Target, known: Mapping[str, nn.Module]) -> str:
    if isinstance(target, re.Pattern) and any(target.search(name) for name in known):
        return "; a compiled pattern must match the whole name, so begin it with '.*', or pass a string"
    endings = {name.rpartition(".")[2] for name in known if not name[-1].isdigit()}
    text = target.pattern if isinstance(target, re.Pattern) else target
    near = difflib.get_close_matches(text.rpartition(".")[2], endings, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    linear = sorted({n.rpartition(".")[2] for n, m in known.items() if isinstance(m, nn.Linear) or is_conv1d(m)})
    if not linear:
        return "; it holds no linear layer. A single layer is wrapped by LoRALinear(layer, LinearAdapter(layer))"
    return f"; its linear layers end in {', '.join(linear)}"
