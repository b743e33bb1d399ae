"""The verbs `opake bench ...`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from opake.cli.output import examples, fail, group, table
from opake.plots import check_plot

from .memory_cli import EPILOG as MEMORY
from .memory_cli import memory
from .step_cli import EPILOG as STEP
from .step_cli import step

__all__ = ["app"]

app = group(
    name="bench", help="Time the fused ops and whole steps, and account for the memory of a step, on this machine."
)

EPILOG = examples(
    "bench kernels", "bench kernels swiglu cross_entropy --vs torch,liger", "bench kernels --plot bars.png"
)


@app.command("kernels", epilog=EPILOG)
def kernels(
    ops: Annotated[list[str] | None, typer.Argument(help="Ops to time; all by default.")] = None,
    vs: Annotated[str, typer.Option(help="Rivals, comma separated: torch, compile, liger.")] = "torch,compile",
    plot: Annotated[Path | None, typer.Option(help="Also draw bars into this file (needs matplotlib).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a row instead of a table.")] = False,
) -> None:
    """Median time, GB/s against the measured copy bandwidth, peak memory and Python cost of each op."""
    import torch

    if not torch.cuda.is_available():
        fail("opake bench kernels needs a CUDA device; this torch sees none")
        raise typer.Exit(1)
    check_plot(plot)
    from .cases import CASES
    from .kernels import PROVIDERS, machine, run

    rivals = [name for name in vs.split(",") if name]
    for given, known, what in ((ops or [], CASES, "op"), (rivals, PROVIDERS, "rival")):
        unknown = [name for name in given if name not in known]
        if unknown:
            fail(f"unknown {what} {', '.join(unknown)}; known: {', '.join(known)}")
            raise typer.Exit(2)
    card, rows = machine(), []
    for row in run(ops or (), ["ours", *[name for name in rivals if name != "ours"]]):
        rows.append(row)
        if as_json:
            print(json.dumps({**card, **row.as_dict()}), flush=True)
    if not as_json:
        head = ("op", "size", "provider", "mode", "ms", "GB/s", "peak GiB", "note")
        title = f"{card['gpu']}, torch {card['torch']}, triton {card['triton']}, copy {card['copy_gbs']} GB/s"
        table(title, head, [_cells(row) for row in rows])
    if plot is not None:
        from .plot import draw

        draw(rows, card, plot)


app.command("memory", epilog=MEMORY)(memory)
app.command("step", epilog=STEP)(step)


def _cells(row: object) -> list[str]:
    names = ("op", "size", "provider", "mode", "ms", "gbs", "peak_gib", "error")
    values = [getattr(row, name) for name in names]
    return ["" if value is None else str(value) for value in values]
