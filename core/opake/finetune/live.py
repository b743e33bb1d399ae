"""Epsilon while it is spent: a bar on a terminal, a line for each log elsewhere; and both curves at the end."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

from opake.demo.curves import NAMES, points


class Live(TrainerCallback):
    """Shows steps, epsilon and the held-out loss."""

    def __init__(self) -> None:
        self._shown = {"epsilon": "", "loss": ""}
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._bar.start()
        self._task = self._bar.add_task("training", total=state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._bar.update(self._task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        spent = next((logs[name] for name in NAMES["epsilon"] if name in logs), None)
        if spent is not None:
            self._shown["epsilon"] = f"epsilon {spent:.3f}"
        if "eval_loss" in logs:
            self._shown["loss"] = f"held-out loss {logs['eval_loss']:.3f}"
        line = "  ".join(text for text in self._shown.values() if text)
        if not self._bar.disable:
            self._bar.update(self._task, description=line)
        elif "eval_loss" in logs:
            print(f"step {state.global_step:5d}  {line}", flush=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._bar.stop()


def draw(log_history: list[dict[str, Any]], path: Path) -> None:
    """Held-out loss and epsilon over steps, into `path`; the suffix chooses the format. Needs matplotlib."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, left = pyplot.subplots(figsize=(6, 3.5))
    right = left.twinx()
    curves = points(log_history)
    for axis, name, colour in ((left, "held-out loss", "tab:blue"), (right, "epsilon", "0.5")):
        axis.plot(*zip(*curves.get(name) or [(0, math.nan)], strict=True), color=colour, marker=".")
        axis.set_ylabel(name, color=colour)
    left.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
