"""Tables and progress for people at a terminal, plain text for everybody else.

Away from a terminal a table is aligned columns without frames, colours or truncation, so that it can be cut and
searched.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import typer

COLOURS = {
    "ok": "green",
    "yes": "green",
    "blocked": "yellow",
    "generic": "dim",
    "conflict": "red",
    "broken": "red",
    "missing": "red",
    "FAIL": "red",
}


def group(**settings: Any) -> typer.Typer:
    """A group of verbs whose help has frames and colours on a terminal only."""
    return typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich" if sys.stdout.isatty() else None,
        context_settings={"help_option_names": ["-h", "--help"]},
        **settings,
    )


def examples(*commands: str) -> str:
    """The end of a help page; paragraphs, because both help formatters join single lines."""
    return "\n\n".join(["Examples:", *(f"opake {command}" for command in commands)])


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a heading: framed and coloured on a terminal, aligned text elsewhere."""
    if sys.stdout.isatty():
        _rich_table(title, head, rows)
    else:
        print("\n".join(_aligned(head, rows)))


def json_out(value: Any) -> None:
    print(json.dumps(value, indent=2))


def note(text: str) -> None:
    print(text)


def fail(text: str) -> None:
    print(f"error: {text}", file=sys.stderr)


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal, nothing elsewhere; the function that it yields is called before each of `total` steps."""
    if not sys.stderr.isatty():
        yield lambda step: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        started = False

        def step(name: str) -> None:
            nonlocal started
            bar.update(task, description=f"{title}: {name}", advance=1 if started else 0)
            started = True

        yield step


def _rich_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
    for name in head:
        grid.add_column(name, overflow="fold")
    for row in rows:
        grid.add_row(*(Text(cell, style=COLOURS.get(cell, "")) for cell in row))
    Console().print(grid)


def _aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
