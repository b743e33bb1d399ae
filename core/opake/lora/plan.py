"""What `apply_lora` will do to a model: every layer that gets an adapter, and of which kind. Nothing changes here.

Combined layers count as the separate ones that they hold when `canonical` is asked for: a target may name the layer, or
a part by the name that it would have alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from opake.errors import InputError

from .adapter import LinearAdapter, check_choices
from .canonical import COMBINED, CanonicalAdapter, Parts, parts_of
from .gating import gating_module
from .linear import LoRALinear
from .router import LoRATopKRouter
from .shapes import is_linear_map, shape_of
from .targets import (
    ALL_LINEAR,
    ROUTER_CLASSES,
    Target,
    candidates,
    first_naming,
    is_router_name,
    matches,
    named_by,
    select,
)
from .unused import require_exclusions, require_used
from .wrapper import AdapterWrapper


@dataclass(frozen=True, slots=True)
class Choices:
    """The arguments of an adapter, with the exceptions that patterns make for single layers."""

    dim: int
    alpha: float
    dim_pattern: Mapping[Target, int]
    alpha_pattern: Mapping[Target, float]
    rest: Mapping[str, Any]

    def of(self, names: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
        """Checked keyword arguments of the adapter of the layer with these names, whose weight has this dtype."""
        narrow, wide = first_naming(names, self.dim_pattern), first_naming(names, self.alpha_pattern)
        dim = self.dim if narrow is None else self.dim_pattern[narrow]
        alpha = self.alpha if wide is None else self.alpha_pattern[wide]
        rest = dict(self.rest)
        check_choices(
            dim,
            alpha,
            rest["dropout"],
            rest["dropout_position"],
            rest["lora_A_init_method"],
            dtype if rest["lora_dtype"] is None else rest["lora_dtype"],
        )
        return {"dim": dim, "alpha": alpha, **rest}


@dataclass(frozen=True, slots=True)
class Step:
    """One layer of the plan; `parts` and `adapted` are set for a combined layer with canonical adapters."""

    name: str
    module: nn.Module
    kind: type[AdapterWrapper]
    choices: Mapping[str, dict[str, Any]]
    parts: Parts | None = None

    def names(self) -> list[tuple[str, ...]]:
        """The names by which patterns may call each adapter of the layer."""
        if self.parts is None:
            return [(self.name,)]
        return [part_names(self.name, part) for part in self.choices]

    def build(self) -> AdapterWrapper:
        """The wrapper with its new adapter; the model does not know it yet."""
        if self.parts is None:
            return self.kind(self.module, LinearAdapter(self._holder(), **self.choices[""]))
        shape = shape_of(self.module)
        made = {
            part: LinearAdapter.for_shape(
                shape.in_features, self.parts[part], **choices, device=shape.device, base_dtype=shape.dtype
            )
            for part, choices in self.choices.items()
        }
        return self.kind(self.module, CanonicalAdapter(self.module, self.parts, made))

    def _holder(self) -> nn.Module:
        return gating_module(self.module)[1] if self.kind is LoRATopKRouter else self.module


def make_plan(
    model: nn.Module, targets: Sequence[Target], exclude: Sequence[Target], choices: Choices, canonical: bool
) -> list[Step]:
    """The steps for every layer that is named.

    Raises:
        InputError: a target, exclusion or pattern that names nothing, a layer that cannot take an adapter or has one, a
            choice that does not exist.
    """
    combined = _combined(model) if canonical else {}
    found = _parts_named(combined, targets, exclude)
    served = [target for target in targets if any(_hits(target, name, parts) for name, parts in combined.items())]
    steps = [_split_step(model, name, combined[name], parts, choices) for name, parts in found.items()]
    named = select(model, targets, exclude, served)
    _require_exclusions(model, targets, exclude, combined)
    steps += [_step(name, module, choices, canonical) for name, module in named.items() if name not in combined]
    kept = _without_inner(steps)
    adapted = [names for step in kept for names in step.names()]
    require_used(model, adapted, {"dim_pattern": choices.dim_pattern, "alpha_pattern": choices.alpha_pattern})
    return kept


def _require_exclusions(
    model: nn.Module, targets: Sequence[Target], exclude: Sequence[Target], combined: Mapping[str, Parts]
) -> None:
    if not exclude:
        return
    parts = {part_names(name, part): (name, part) for name, found in combined.items() for part in found}
    targeted = [names[0] for names, (name, part) in parts.items() if _any(targets, name, part)]
    for name, module in candidates(model):
        if any(named_by(name, module, target, model) for target in targets):
            targeted.append(name)
    require_exclusions(model, exclude, targeted, [name for names in parts for name in names])


def _without_inner(steps: list[Step]) -> list[Step]:
    """The steps without the layer by which a router among them makes its logits: the router's own step adapts it."""
    kept = []
    for step in steps:
        outer = next((each for each in steps if step.name.startswith(f"{each.name}.")), None)
        if outer is None:
            kept.append(step)
        elif outer.kind is not LoRATopKRouter or gating_module(outer.module)[1] is not step.module:
            raise InputError(f"{outer.name} and {step.name}, which is inside it, are both named; exclude one of them")
    return kept


def kind_of(name: str, module: nn.Module) -> type[AdapterWrapper]:
    """The wrapper class that fits a module; InputError where none does."""
    if isinstance(module, AdapterWrapper):
        raise InputError(f"{name} has an adapter already; take it off with opake.lora.remove_lora(model) first")
    if isinstance(module, nn.Embedding):
        raise InputError(
            f"{name} is an embedding; the layers of opake.lora go on linear layers and routers, PEFT has it"
        )
    if (is_router_name(name) or type(module).__name__.endswith(ROUTER_CLASSES)) and _routes(module):
        return LoRATopKRouter
    if is_linear_map(module):
        return LoRALinear
    raise InputError(
        f"{name} is a {type(module).__name__}, which is neither a linear layer nor a router; name layers inside it, "
        "or leave it out with exclude"
    )


def _routes(module: nn.Module) -> bool:
    try:
        gating_module(module)
    except InputError:
        return False
    return True


def _step(name: str, module: nn.Module, choices: Choices, canonical: bool) -> Step:
    if canonical and name.rpartition(".")[2] in COMBINED:
        raise InputError(
            f"canonical=True: how {name} lays its projections out is not known, so it cannot have an adapter for each; "
            "leave it out with exclude, or pass canonical=False for one adapter over all"
        )
    kind = kind_of(name, module)
    holder = gating_module(module)[1] if kind is LoRATopKRouter else module
    return Step(name, module, kind, {"": choices.of([name], shape_of(holder).dtype)})


def _split_step(model: nn.Module, name: str, parts: Parts, adapted: list[str], choices: Choices) -> Step:
    module = model.get_submodule(name)
    kind, dtype = kind_of(name, module), shape_of(module).dtype
    return Step(name, module, kind, {part: choices.of(part_names(name, part), dtype) for part in adapted}, parts)


def _combined(model: nn.Module) -> dict[str, Parts]:
    """The parts of every combined layer whose layout is known."""
    found = {}
    for name, module in candidates(model):
        owner, _, last = name.rpartition(".")
        if last in COMBINED and not isinstance(module, AdapterWrapper):
            parts = parts_of(model.get_submodule(owner), last, module)
            if parts is not None:
                found[name] = parts
    return found


def _parts_named(
    combined: Mapping[str, Parts], targets: Sequence[Target], exclude: Sequence[Target]
) -> dict[str, list[str]]:
    found = {}
    for name, parts in combined.items():
        adapted = [p for p in parts if _any(targets, name, p) and not _any(exclude, name, p)]
        if adapted:
            found[name] = adapted
    return found


def _any(targets: Sequence[Target], name: str, part: str) -> bool:
    return any(_names_part(target, name, part) for target in targets)


def part_names(name: str, part: str) -> tuple[str, str]:
    """The name that a part of a combined layer would have alone, and that of the layer."""
    return f"{name.rpartition('.')[0]}.{part}".removeprefix("."), name


def _names_part(target: Target, name: str, part: str) -> bool:
    return target == ALL_LINEAR or any(matches(each, target) for each in part_names(name, part))


def _hits(target: Target, name: str, parts: Parts) -> bool:
    """Whether the target is about a part of this combined layer."""
    return any(_names_part(target, name, part) for part in parts)
