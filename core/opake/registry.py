"""Which families there are, and the one that is asked for: entry points, without a list of our own.

Listing reads packaging metadata and imports no plugin; loading imports exactly one family and its extensions and gives
them a plugin manager of their own. Our families are found on the same road as a third party's. The environment variable
`OPAKE_BLOCK_FAMILIES` holds names to leave out, separated by commas: `llama`, or `distribution:llama` for one claimant.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import importlib_metadata

from opake import hookcalls, presence
from opake.errors import FamilyBlocked, FamilyConflict, FamilyImportError, UnknownFamily
from opake.hookcalls import Planned, Plugin
from opake.hookspecs import HOOKS

__all__ = ["BLOCK", "EXTENSIONS", "FAMILIES", "Claim", "Family", "Planned", "claims", "listed", "load", "refresh"]

FAMILIES = "opake.families"
EXTENSIONS = "opake.extensions"
BLOCK = "OPAKE_BLOCK_FAMILIES"
OURS = "opake"

# set by opake.checking.isolated; None means sys.path
_search_path: list[str] | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """A plugin as its packaging metadata declares it; nothing of it has been imported.

    name: the model_type. status: `ok`, `blocked`, `conflict`, `broken` or `needs transformers >= X`. source and
    version: of the distribution. module: the entry point's value. group: FAMILIES or EXTENSIONS.
    """

    name: str
    status: str
    source: str
    version: str
    module: str
    group: str

    def __str__(self) -> str:
        kind = "family" if self.group == FAMILIES else "extension of"
        return f"{kind} {self.name!r} ({self.module}, from {self.source} {self.version})"


@dataclass(frozen=True, slots=True)
class Family:
    """A loaded family and its extensions, validated; `plan` asks their hooks."""

    model_type: str
    claim: Claim
    extensions: tuple[Claim, ...]
    plugins: tuple[Plugin, ...]

    def plan(self, hf: Any, config: Any, hooks: Iterable[str] = HOOKS) -> list[Planned]:
        """Records of the hooks named, each with its hook and its line of source, the family's before its extensions'.

        hf: the Transformers modeling module of the model, or what stands in for it. config: the model's config.
        Raises FamilyInvalid where a hook raises, or returns what is not a record, naming the line.
        """
        hooks = tuple(hooks)
        unknown = [hook for hook in hooks if hook not in HOOKS]
        if unknown:
            raise ValueError(f"no hook named {', '.join(unknown)}; the hooks are {', '.join(HOOKS)}")
        return hookcalls.plan(self.plugins, hf, config, hooks)


def listed() -> list[Claim]:
    """Every claim to a model_type, sorted by name; conflicting and blocked ones too. Imports no plugin."""
    return [_judged(claim, everyone) for _, everyone in sorted(_by_name(FAMILIES).items()) for claim in everyone]


def claims(group: str = FAMILIES, name: str | None = None) -> list[Claim]:
    """Claims of a group that are not blocked, optionally of one name, ours first, then by distribution name."""
    found = _by_name(group)
    names = sorted(found) if name is None else [name]
    return [claim for key in names for claim in found.get(key, ()) if not _blocked(claim)]


def load(model_type: str) -> Family:
    """Import the one plugin that claims `model_type`, with its extensions, and check it against the hooks.

    Raises UnknownFamily, FamilyBlocked, FamilyConflict, FamilyImportError or FamilyInvalid. The result is cached until
    `OPAKE_BLOCK_FAMILIES` or `sys.path` changes; every process loads for itself and nothing is written anywhere.
    """
    return _load(model_type, _where(), _block_list())


def idle_blocks() -> list[str]:
    """Words of `OPAKE_BLOCK_FAMILIES` that block nothing: of a plugin that is not installed, or misspelt."""
    claimed = {word for c in _read(_where()) for word in (c.name, _word(f"{c.source}:{c.name}"))}
    return sorted(_block_list() - claimed)


def refresh() -> None:
    """Forget what was read and loaded, e.g. after installing a plugin into the running process."""
    _read.cache_clear()
    _load.cache_clear()


@functools.cache
def _load(model_type: str, where: tuple[str, ...], block_list: frozenset[str]) -> Family:
    claim = _one_claim(model_type)
    extensions = tuple(claims(EXTENSIONS, model_type))
    plugins = tuple(Plugin(f"{c.source}:{c.module}", str(c), _imported(c)) for c in (claim, *extensions))
    hookcalls.manager(plugins)
    return Family(model_type, claim, extensions, plugins)


def _one_claim(model_type: str) -> Claim:
    everyone = _by_name(FAMILIES).get(model_type, ())
    if not everyone:
        near = difflib.get_close_matches(model_type, _by_name(FAMILIES), n=3)
        raise UnknownFamily(
            f"no family for model_type {model_type!r}" + (f"; did you mean {' or '.join(near)}?" if near else "")
        )
    live = claims(FAMILIES, model_type)
    if not live:
        who = " and ".join(_who(claim) for claim in everyone)
        raise FamilyBlocked(f"family {model_type!r} of {who} is blocked by {BLOCK}={os.environ[BLOCK]}")
    if len(live) > 1:
        who = " and ".join(_who(claim) for claim in live)
        raise FamilyConflict(
            f"family {model_type!r} is claimed by {who}; uninstall all but one, or set {BLOCK}={_way_out(live[1:])}"
        )
    return live[0]


def _imported(claim: Claim) -> Any:
    try:
        return importlib_metadata.EntryPoint(claim.name, claim.module, claim.group).load()
    # a module that ends the process on import breaks its own model type, too
    except (Exception, SystemExit) as error:
        raise FamilyImportError(
            f"{claim} does not import: {type(error).__name__}: {error};"
            f" mend or uninstall it, or set {BLOCK}={_way_out([claim])}"
        ) from error


def _judged(claim: Claim, everyone: list[Claim]) -> Claim:
    """The claim with its status, as far as it can be told without importing the plugin or Transformers."""
    if _blocked(claim):
        status = "blocked"
    elif sum(not _blocked(other) for other in everyone) > 1:
        status = "conflict"
    else:
        status = _health(claim)
    return Claim(claim.name, status, claim.source, claim.version, claim.module, claim.group)


def _health(claim: Claim) -> str:
    file = presence.module_file(claim.module.partition(":")[0])
    if file is None:
        return "broken"
    try:
        version = presence.since(file).get(claim.name)
    except (SyntaxError, ValueError, AttributeError, OSError):
        return "broken"
    if version and presence.modeling_module(claim.name, claim.module) is None:
        return f"needs transformers >= {version}"
    return "ok"


def _by_name(group: str) -> dict[str, list[Claim]]:
    found: dict[str, list[Claim]] = {}
    for claim in _read(_where()):
        if claim.group == group:
            found.setdefault(claim.name, []).append(claim)
    return found


@functools.lru_cache(maxsize=4)
def _read(where: tuple[str, ...]) -> tuple[Claim, ...]:
    """All claims of both groups. The first distribution of a name on the path is the one that Python would import."""
    found: dict[tuple[str, ...], Claim] = {}
    seen: set[str] = set()
    for distribution in importlib_metadata.distributions(path=list(where)):
        name = distribution.name
        if not name or _normal(name) in seen:
            continue
        seen.add(_normal(name))
        for entry in distribution.entry_points:
            if entry.group in (FAMILIES, EXTENSIONS):
                claim = Claim(entry.name, "ok", name, distribution.version, entry.value, entry.group)
                found[(entry.group, entry.name, name, entry.value)] = claim
    return tuple(sorted(found.values(), key=lambda c: (_normal(c.source) != OURS, _normal(c.source), c.name, c.module)))


def _where() -> tuple[str, ...]:
    return tuple(sys.path if _search_path is None else _search_path)


def _block_list() -> frozenset[str]:
    words = os.environ.get(BLOCK, "").split(",")
    return frozenset(_word(word) for word in words if word.strip())


def _blocked(claim: Claim) -> bool:
    return not _block_list().isdisjoint({claim.name, _word(f"{claim.source}:{claim.name}")})


def _word(word: str) -> str:
    source, colon, name = word.strip().rpartition(":")
    return f"{_normal(source)}{colon}{name}"


def _way_out(losers: Iterable[Claim]) -> str:
    """A value for the variable that blocks these and all that it blocks already."""
    before = [word.strip() for word in os.environ.get(BLOCK, "").split(",") if word.strip()]
    return ",".join([*before, *(f"{claim.source}:{claim.name}" for claim in losers)])


def _who(claim: Claim) -> str:
    return f"{claim.source} {claim.version}"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
