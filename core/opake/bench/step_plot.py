"""Time and memory of a step, a bar for each way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw"]


def draw(rows: Sequence[Any], title: str, path: Path) -> None:
    """Draw the rows that have figures into `path`; the suffix chooses the format."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    shown = [row for row in rows if row.ms is not None]
    names = [row.way if row.private else f"{row.way} (not private)" for row in shown]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(7.6, 0.5 + 0.32 * max(len(shown), 1)), sharey=True)
    colours = ["C0" if row.private else "C7" for row in shown]
    for axis, values, label in (
        (left, [row.running_ms for row in shown], "ms a step"),
        (right, [row.peak_gib for row in shown], "peak, GiB"),
    ):
        axis.barh(names, values, color=colours)
        axis.set_xlabel(label, fontsize=8)
        axis.tick_params(labelsize=7)
    left.invert_yaxis()
    figure.suptitle(title, fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
