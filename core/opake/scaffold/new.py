"""`new_family`: survey a model type, prove the declaration, and write it as a distribution."""

from __future__ import annotations

import difflib
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

from opake import __version__, registry
from opake.checking.family import Outcome
from opake.checking.sweep import quiet
from opake.errors import InputError

from . import render
from .declaration import Declaration
from .proof import prove
from .survey import survey


@dataclass(frozen=True)
class Scaffold:
    """What was written: the directory and its files, the declaration, and the outcome of its check."""

    directory: Path
    files: tuple[Path, ...]
    declaration: Declaration
    outcome: Outcome


def new_family(model_type: str, directory: Path, distribution: str | None = None) -> Scaffold:
    """Write a distribution that serves `model_type`; everything in it was proven on a tiny random model.

    directory: made if it is not there; must be empty. distribution: its name, `opake-MODEL-TYPE` if not given.

    Raises:
        InputError: the directory has files, the name is none that a distribution can have, the installed
            Transformers has no such causal language model, or none that is tiny and runs. Nothing is written then.
    """
    name = distribution or f"opake-{model_type.replace('_', '-')}"
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", name):
        raise InputError(f"{name!r} is no name for a distribution; use letters, digits, '.', '_' and '-'")
    if re.sub(r"[-_.]+", "-", name).lower() == registry.OURS:
        raise InputError(f"a distribution named {name!r} would take the place of opake itself; use another name")
    _require_room(directory)
    _require_causal_lm(model_type)
    with quiet(), warnings.catch_warnings():
        # what a tiny model that is thrown away a second later has to say
        warnings.simplefilter("ignore")
        found = survey(model_type)
        outcome = prove(found)
    return Scaffold(directory, tuple(_write(found, directory, name)), found, outcome)


def _require_room(directory: Path) -> None:
    """Asked before anything is measured: that takes seconds, and would be lost."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InputError(f"{directory} is not an empty directory; name one that does not exist yet")
    nearest = next(each for each in (directory, *directory.absolute().parents) if each.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise InputError(f"{directory} cannot be made: {nearest} is no directory that may be written to")


def _require_causal_lm(model_type: str) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    if model_type not in KNOWN:
        near = difflib.get_close_matches(model_type, KNOWN, n=2)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise InputError(f"the installed Transformers has no causal language model of model_type {model_type!r}{hint}")


def _write(found: Declaration, directory: Path, name: str) -> list[Path]:
    texts = {
        f"{found.module}.py": render.module(found),
        "pyproject.toml": render.pyproject(found, name, __version__),
        "README.md": render.readme(found, name),
        "tests/conftest.py": render.CONFTEST,
        f"tests/test_{found.module.removeprefix('opake_')}.py": render.test(found),
    }
    files = []
    for relative, text in texts.items():
        file = directory / relative
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        files.append(file)
    return files
