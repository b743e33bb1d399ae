"""What a plot needs, asked before anything is computed for it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from opake.errors import InputError, MissingDependency


def check_plot(path: Path | None, made: Path | None = None) -> None:
    """Raise where a plot could not be drawn: MissingDependency without matplotlib, InputError without the folder.

    made: a folder that there will be by then.
    """
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependency("--plot needs the package matplotlib: pip install matplotlib")
    if path.parent != made and not path.parent.is_dir():
        raise InputError(f"--plot {path}: there is no folder {path.parent}; make it first")
