"""The privacy card: what was done and what follows from it, written next to the weights for people and for programs.

The JSON file is also the accountant's memory: training resumes from it, and from nothing else. Neither file holds the
state of a random generator or anything that depends on single rows.
"""

from __future__ import annotations

import json
import math
from importlib import metadata
from pathlib import Path
from typing import Any

from opake import __version__
from opake.errors import InputError
from opake.trainer.accounting import History

JSON_NAME, TEXT_NAME, MARKS = "privacy.json", "PRIVACY.md", ("test_only", "logged_without_noise")
MECHANISM = "DP-SGD: per-example clipping, Poisson sampling, Gaussian noise on the sum of each step"
UNIT = "one row of the training data set, added or removed"
NOTES = """
The number of rows is taken as public. Choosing hyperparameters by training several times on the same rows is not
accounted, nor is the rounding of floating-point noise. Statistics logged without noise are not covered.
"""


def make(history: History, epsilon: float, **facts: Any) -> dict[str, Any]:
    """The card as a JSON object; `facts` are what only the trainer knows. An infinite epsilon is null."""
    known = {d.metadata["Name"]: d.version for d in map(metadata.distribution, ("torch", "transformers", "peft"))}
    head = {"mechanism": MECHANISM, "unit": UNIT, "epsilon": epsilon if math.isfinite(epsilon) else None}
    marks = {mark: getattr(history, mark) for mark in MARKS}
    tail = {"versions": {"opake": __version__, **known}, "history": [p._asdict() for p in history.phases]}
    return {**head, **facts, **marks, "steps": history.steps, **tail}


def write(folder: str | Path, card: dict[str, Any]) -> None:
    """Write both files into a folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, JSON_NAME).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    Path(folder, TEXT_NAME).write_text(text(card), encoding="utf-8")


def read_history(folder: str | Path) -> tuple[History, int]:
    """The history in a checkpoint, and how many steps of its training had been made.

    Raises InputError where there is none, or none that can be read or is enough: epsilon would be under-reported.
    """
    if not Path(folder, JSON_NAME).is_file():
        raise InputError(
            f"{folder} has no {JSON_NAME}, so the steps behind it cannot be accounted; resume from a checkpoint of "
            "DPTrainer, or load its weights as those of a model that is not private"
        )
    try:
        names = (JSON_NAME, "trainer_state.json")
        held, state = (json.loads(Path(folder, name).read_text(encoding="utf-8")) for name in names)
        history = History.from_json(held["history"], **{mark: bool(held[mark]) for mark in MARKS})
        done = int(state["global_step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise InputError(f"{folder} is no checkpoint, or holds no privacy history ({why}); take another") from error
    if history.steps < done:
        raise InputError(f"{folder} has made {done} steps, but {history.steps} of them were accounted")
    return history, done


def text(card: dict[str, Any]) -> str:
    """The card as Markdown."""
    spent = "no finite epsilon" if card["epsilon"] is None else f"epsilon = {card['epsilon']:.3f}"
    lines = ["# Privacy card", "", f"**{spent}** at delta = {card['delta']:.3g}"]
    if card["test_only"]:
        lines += ["", "**For tests only: the seed of the noise is public, so nobody is protected.**"]
    apart = ("epsilon", "delta", "test_only", "history", "versions")
    facts = {name.replace("_", " "): value for name, value in card.items() if name not in apart} | card["versions"]
    lines += ["", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items()), ""]
    for phase in card["history"]:
        rate, noise = phase["sampling_rate"], phase["noise_multiplier"]
        lines.append(f"- {phase['steps']} steps at sampling rate {rate:.6g} and noise multiplier {noise:.6g}")
    return "\n".join(lines) + "\n" + NOTES
