"""The recorded answers of the sweep: for each tested Transformers, which causal language models are right.

The file is written by `opake.checking.sweep` and holds no opinion about another version than those it names. Reading it
imports neither torch nor Transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one model type: the largest relative error of a per-example gradient, or a reason against it.

    note: what a proof leaves out or judges otherwise.
    """

    model: str = "-"
    error: float | None = None
    reason: str = ""
    note: str = ""

    @property
    def proven(self) -> bool:
        return not self.reason


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers for one version of Transformers; `torch` is the version that they were found with."""

    transformers: str
    torch: str
    types: Mapping[str, Answer]


def path() -> Path:
    return Path(str(resources.files("opake") / "data" / "generic.json"))


def load() -> list[Answers]:
    """All recorded answers, in the order of the versions."""
    data = json.loads(path().read_text(encoding="utf-8"))
    return [
        Answers(version, entry["torch"], {name: Answer(**fields) for name, fields in entry["types"].items()})
        for version, entry in data.items()
    ]


def for_version(installed: str) -> Answers:
    """The answers for the installed Transformers, else those for the newest one that was tested."""
    known = load()
    return next((answers for answers in known if answers.transformers == installed), known[-1])


def record(new: Answers) -> None:
    """Put answers into the file, in the place of those for the same version; one line a model type."""
    known = {answers.transformers: answers for answers in load()} if path().exists() else {}
    known[new.transformers] = new
    ordered = sorted(known.values(), key=lambda answers: [int(part) for part in answers.transformers.split(".")[:3]])
    path().write_text("{\n" + ",\n".join(map(_entry, ordered)) + "\n}\n", encoding="utf-8")


def _entry(answers: Answers) -> str:
    lines = [f"      {json.dumps(name)}: {json.dumps(_fields(each))}" for name, each in sorted(answers.types.items())]
    head = f'  {json.dumps(answers.transformers)}: {{\n    "torch": {json.dumps(answers.torch)},\n    "types": {{\n'
    return head + ",\n".join(lines) + "\n    }\n  }"


def _fields(answer: Answer) -> dict[str, Any]:
    """The fields that say something, the error to two digits."""
    fields = {key: value for key, value in asdict(answer).items() if value not in ("", None)}
    if answer.error is not None:
        fields["error"] = float(f"{answer.error:.1e}")
    return fields
