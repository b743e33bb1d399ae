"""What patching did to a model, row by row, as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

STATES = ("applied", "already", "off", "skipped", "stock")


@dataclass(frozen=True, slots=True)
class Row:
    """One record at one site. `state` is one of `STATES`; `reason` says why it is not `applied`, or how it is."""

    record: str
    hook: str
    site: str
    flag: str
    state: str
    reason: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Fallback:
    """Something that a patched model did the slower or plainer way in a forward, why, and how often."""

    site: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class PatchReport:
    """Every record that was considered for a model (or for the process) and what became of it.

    `str(report)` is a table with one line for all sites of a record that fared alike; `report.to_json()` keeps every
    row and `PatchReport.from_json` reads it back.
    """

    target: str
    family: str
    rows: tuple[Row, ...]
    fallbacks: tuple[Fallback, ...] = ()

    def __str__(self) -> str:
        head = ("record", "flag", "state", "sites", "reason")
        lines = [*_grouped(self.rows)]
        text = f"{self.target}  (family: {self.family})\n" + _table([head, *lines])
        if self.fallbacks:
            shown = [(f.site, str(f.count), f.reason) for f in self.fallbacks]
            text += "\n\nfell back while running\n" + _table([("site", "times", "reason"), *shown])
        return text

    def find(self, **wanted: str) -> tuple[Row, ...]:
        """The rows whose fields equal the given ones, e.g. `report.find(flag="rope", state="applied")`."""
        return tuple(row for row in self.rows if all(getattr(row, key) == value for key, value in wanted.items()))

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(asdict(self), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> PatchReport:
        data: dict[str, Any] = json.loads(text)
        unknown = set(data) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"not a PatchReport: unknown keys {sorted(unknown)}")
        rows = tuple(Row(**row) for row in data["rows"])
        return cls(data["target"], data["family"], rows, tuple(Fallback(**f) for f in data["fallbacks"]))


def _grouped(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    sites: dict[tuple[str, str, str, str], Counter[str]] = {}
    for row in rows:
        sites.setdefault((row.record, row.flag, row.state, row.reason), Counter())[row.site] += 1
    return [(record, flag, state, _sites(names), why) for (record, flag, state, why), names in sites.items()]


def _sites(names: Counter[str]) -> str:
    first = next(iter(names))
    return first if len(names) == 1 else f"{first} (+{len(names) - 1})"


def _table(lines: list[tuple[str, ...]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]) - 1)]
    rows = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(line[:-1], widths, strict=True)), line[-1]]).rstrip()
        for line in lines
    ]
    rule = "  ".join(["-" * w for w in widths] + ["-" * len(lines[0][-1])])
    return "\n".join([rows[0], rule, *rows[1:]])
