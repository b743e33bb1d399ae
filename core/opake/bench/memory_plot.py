"""Peak memory against sequence length, a line for each way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw"]


def draw(peaks: Sequence[Any], title: str, path: Path) -> None:
    """Draw the peaks into `path`; the suffix chooses the format."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, axis = pyplot.subplots(figsize=(5.2, 3.6))
    for way in dict.fromkeys(each.way for each in peaks):
        mine = [each for each in peaks if each.way == way and each.peak is not None]
        axis.plot([each.tokens for each in mine], [each.peak / 2**30 for each in mine], marker="o", label=way)
    axis.set_xlabel("tokens a row", fontsize=8)
    axis.set_ylabel("peak, GiB", fontsize=8)
    axis.set_ylim(bottom=0)
    axis.tick_params(labelsize=7)
    axis.set_title(title, fontsize=8)
    axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
