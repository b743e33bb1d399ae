"""Loss and epsilon over the steps of a training, as points, and as a line of characters each for a terminal."""

from __future__ import annotations

import math
import sys
from typing import Any

NAMES = {"held-out loss": ("eval_loss",), "loss": ("loss",), "epsilon": ("epsilon", "epsilon_test_only")}
BARS, PLAIN = "▁▂▃▄▅▆▇█", "_.-:=+*#"


def points(log_history: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """{name of a curve: (step, value) of each log that has it}; curves without a point are left out."""
    found = {
        name: [(entry["step"], float(entry[key])) for entry in log_history for key in keys if key in entry]
        for name, keys in NAMES.items()
    }
    return {name: [point for point in curve if math.isfinite(point[1])] for name, curve in found.items() if curve}


def sketch(log_history: list[dict[str, Any]]) -> list[str]:
    """A line for each curve: its shape between its smallest and its largest value, the first and the last value."""
    bars = BARS if _shows(BARS) else PLAIN
    lines = []
    for name, curve in points(log_history).items():
        values = [value for _, value in curve]
        if values:
            low, width = min(values), (max(values) - min(values)) or 1
            shape = "".join(bars[round((value - low) / width * (len(bars) - 1))] for value in values)
            lines.append(f"{name:<13} {shape}  {values[0]:.3f} to {values[-1]:.3f}")
    return lines


def _shows(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
