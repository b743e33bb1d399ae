"""The verb `opake bench step`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from opake.cli.output import examples, fail, note, progress, table
from opake.errors import OpakeError
from opake.plots import check_plot

from .memory_cli import no_room, setting

__all__ = ["EPILOG", "step"]

EPILOG = examples(
    "bench step", "bench step llama-3.2-1b --vs hf,liger", "bench step ./model --seq 512 --batch 8 --plot step.png"
)
OURS = ("ours", "eager", "vmap", "remat-mlp", "remat", "ordinary")
HEAD = ("way", "private", "ms", "in a row", "tokens/s", "peak GiB", "difference", "note")


def step(
    model: Annotated[
        str | None,
        typer.Argument(help="A directory with a config.json, a model type (then tiny), or public shapes by name."),
    ] = None,
    seq: Annotated[int | None, typer.Option(min=2, help="Tokens of a row.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Rows of a step.")] = None,
    rank: Annotated[
        int, typer.Option(min=0, help="Rank of the LoRA adapters, on every linear layer; 0 trains all.")
    ] = 16,
    vs: Annotated[str, typer.Option(help="Rivals, comma separated: hf, hf-vmap, liger, opacus, loop.")] = "hf",
    size: Annotated[list[str] | None, typer.Option(help="A setting of the config, name=value; repeatable.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw bars into this file (needs matplotlib).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a row instead of a table.")] = False,
) -> None:
    """Time and memory of one private training step on this machine, beside an ordinary one and beside rivals.

    Weights are random: nothing is loaded or downloaded. Without CUDA the sizes are small and times are processor time.
    """
    import torch

    from . import step as bench
    from .step_models import sizes_of
    from .step_ways import WAYS

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rivals = [name for name in vs.split(",") if name]
    if unknown := [name for name in rivals if name not in WAYS]:
        fail(f"unknown rival {', '.join(unknown)}; known: {', '.join(WAYS)}")
        raise typer.Exit(2)
    check_plot(plot)
    large = device == "cuda"
    try:
        settings = dict(map(setting, size or ()))
        named = model or ("qwen2-0.5b" if large else "qwen2")
        sizes = sizes_of(named, settings, batch or (16 if large else 4), seq or (1024 if large else 64), rank)
    except (OpakeError, ValueError) as error:
        fail(str(error))
        raise typer.Exit(2) from error
    ways, rows = list(dict.fromkeys([*OURS, *rivals])), []
    with progress(named, len(ways)) as before, no_room(named):
        for row in bench.run(sizes, ways, device, before):
            rows.append(row)
            if as_json:
                print(json.dumps({**bench.machine(device), "model": named, **row.as_dict()}), flush=True)
    title = ", ".join([named, f"{sizes.rows} x {sizes.tokens}", *bench.machine(device).values()])
    if not as_json:
        note(title)
        table("one step", HEAD, [_cells(row) for row in rows])
    if plot is not None:
        from .step_plot import draw

        draw(rows, title, plot)


def _cells(row: Any) -> list[str]:
    speed = "" if row.running_ms is None else f"{row.rows * row.tokens / row.running_ms * 1e3:.0f}"
    numbers = [_number(row.ms, ".1f"), _number(row.running_ms, ".1f"), speed, _number(row.peak_gib, ".2f")]
    return [row.way, "yes" if row.private else "no", *numbers, _number(row.difference, ".1e"), row.note]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
