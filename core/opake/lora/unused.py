"""Words of a call of `apply_lora` that would do nothing: exclusions of no layer, patterns that give none a value.

They are mistakes of spelling, or of order, and nobody would see them in the model that comes out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from opake.errors import InputError

from .targets import Target, candidates, first_naming, matches, names_nothing, shown


def require_exclusions(
    model: nn.Module, exclude: Sequence[Target], targeted: Collection[str], parts: Collection[str]
) -> None:
    """Raise InputError for an exclusion that names nothing, or a module whose layers inside stay targeted.

    One that names a layer without an adapter anyway, such as the head, says what is true and is no mistake.

    targeted: names of the layers, and of the parts of combined ones, that the targets name. parts: those of all parts.
    """
    known = dict(candidates(model))
    for each in exclude:
        if any(matches(name, each) for name in (*targeted, *parts)):
            continue
        named = [name for name in known if matches(name, each)]
        if not named:
            raise names_nothing(model, each, known, "exclude: ")
        inside = next(((n, t) for n in named for t in targeted if t.startswith(f"{n}.")), None)
        if inside is not None:
            raise InputError(
                f"exclude: {shown(each)} names {inside[0]}, not the layers inside, and {inside[1]} is among the "
                f"targets; to leave out all inside, write '{inside[0].rpartition('.')[2]}.*'"
            )


def require_used(
    model: nn.Module, adapted: Sequence[tuple[str, ...]], patterns: Mapping[str, Mapping[Target, Any]]
) -> None:
    """Raise InputError for a key of a pattern from which no adapter takes its value.

    adapted: the names of each adapter, of which a key may use any.
    """
    for what, pattern in patterns.items():
        used = [first_naming(names, pattern) for names in adapted]
        for each in pattern:
            if each in used:
                continue
            if any(matches(name, each) for names in adapted for name in names):
                raise InputError(
                    f"{what}: every layer that {shown(each)} names takes the value of a key before it; the first that "
                    "fits holds, so put the narrower key first"
                )
            known = dict(candidates(model))
            if not any(matches(name, each) for name in known):
                raise names_nothing(model, each, known, f"{what}: ")
            raise InputError(
                f"{what}: {shown(each)} names no layer that gets an adapter here; take it out, or target it"
            )
