"""Bars of a benchmark run: one panel an op, the copy-bandwidth limit as a line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw"]

_TIMED = ("plain", "vmap", "group")


def draw(rows: Sequence[Any], card: dict[str, Any], path: Path) -> None:
    """Draw the timed rows into `path`; the suffix chooses the format."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    timed = [row for row in rows if row.mode in _TIMED and row.ms is not None]
    ops = list(dict.fromkeys(row.op for row in timed))
    columns = min(len(ops), 4) or 1
    lines = -(-len(ops) // columns) or 1
    figure, axes = pyplot.subplots(lines, columns, figsize=(3.6 * columns, 2.6 * lines), squeeze=False)
    for axis in axes.flat[len(ops) :]:
        axis.set_visible(False)
    for axis, op in zip(axes.flat, ops, strict=False):
        mine = [row for row in timed if row.op == op]
        labels = [row.provider if row.mode == "plain" else f"{row.provider} {row.mode}" for row in mine]
        colours = ["tab:blue" if row.provider == "ours" else "tab:gray" for row in mine]
        axis.barh(labels, [row.ms for row in mine], color=colours)
        axis.axvline(mine[0].ms * mine[0].gbs / card["copy_gbs"], color="black", linestyle=":", linewidth=1)
        axis.set_title(f"{op}  {mine[0].size}", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.set_xlabel("ms, forward + backward", fontsize=7)
        axis.invert_yaxis()
    figure.suptitle(
        f"{card['gpu']}, torch {card['torch']}, triton {card['triton']}; dotted: copy bandwidth", fontsize=8
    )
    figure.tight_layout()
    figure.savefig(path, dpi=150)
