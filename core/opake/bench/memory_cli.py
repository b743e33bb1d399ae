"""The verb `opake bench memory`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from opake.cli.output import examples, fail, note, table
from opake.errors import InputError, OpakeError
from opake.plots import check_plot

__all__ = ["EPILOG", "memory", "no_room", "setting"]

EPILOG = examples(
    "bench memory qwen2",
    "bench memory ./model --rows 16 --tokens 1024 --budget 12",
    "bench memory llama --lengths 64,128 --plot peaks.png",
)
GIB = 2**30


def memory(
    model: Annotated[str, typer.Argument(help="A directory with a config.json, or a model type (then tiny).")],
    rows: Annotated[int, typer.Option(min=1, help="Rows of a microbatch.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a row.")] = 64,
    rank: Annotated[int, typer.Option(min=0, help="Rank of the adapters; 0 trains every parameter.")] = 8,
    size: Annotated[list[str] | None, typer.Option(help="A setting of the config, name=value; repeatable.")] = None,
    budget: Annotated[float | None, typer.Option(help="Give the largest microbatch for so many GiB.")] = None,
    lengths: Annotated[str, typer.Option(help="Also measure peaks at these lengths, comma separated.")] = "",
    plot: Annotated[Path | None, typer.Option(help="Draw those peaks into this file (needs matplotlib).")] = None,
    engine: Annotated[str, typer.Option(help="auto, vmap or batched.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """What a step of per-example gradients keeps by part of the model, beside the floor; checkpointed or not.

    Weights are random: nothing is loaded or downloaded. Without CUDA the figures are live bytes of tensors.
    """
    import torch

    from .memory_model import WAYS, Sizes, config_of, with_positions

    device = "cuda" if torch.cuda.is_available() else "cpu"
    check_plot(plot)
    at = _lengths(lengths)
    _check(budget, plot, at)
    try:
        config = with_positions(config_of(model, dict(map(setting, size or ()))), max([tokens, *at]))
        sizes = Sizes(config, rows, tokens, rank)
        with no_room(model):
            found = _measured(sizes, device, engine, budget, at, WAYS)
    except (OpakeError, ValueError) as error:
        fail(str(error))
        raise typer.Exit(2) from error
    if as_json:
        plain = {key: [each.as_dict() for each in value] for key, value in found.items() if key != "largest"}
        print(json.dumps({"device": device, **plain, "largest": found["largest"]}, indent=2))
    else:
        _print(found, sizes, budget)
    if plot is not None:
        from .memory_plot import draw

        draw(found["curve"], f"{model}, {rows} rows, {device}", plot)


def _lengths(text: str) -> list[int]:
    named = [each.strip() for each in text.split(",") if each]
    if wrong := [each for each in named if not each.isdecimal() or int(each) < 1]:
        raise InputError(f"--lengths {text!r}: numbers of tokens, separated by commas; {wrong[0]!r} is none")
    return [int(each) for each in named]


def _check(budget: float | None, plot: Path | None, lengths: Sequence[int]) -> None:
    if budget is not None and not budget > 0:
        raise InputError(f"--budget {budget}: a number of GiB above zero")
    if plot is not None and not lengths:
        raise InputError("--plot draws the peaks of --lengths; give some, such as --lengths 64,128")


def _measured(
    sizes: Any, device: str, engine: str, budget: float | None, lengths: list[int], ways: Any
) -> dict[str, Any]:
    from . import memory as bench

    found: dict[str, Any] = {"largest": {}, "curve": []}
    for way in ("folded", "remat"):
        found[way] = bench.kept(sizes, way, device, engine)
    half = max(sizes.rows // 2, 1)
    found["peaks"] = [
        bench.peak(sizes, way, n, device, engine) for way in ("folded", "remat") for n in sorted({half, sizes.rows})
    ]
    if budget is not None:
        for way in ("folded", "remat"):
            mine = [each for each in found["peaks"] if each.way == way]
            found["largest"][way] = bench.largest(mine, budget * GIB) if len(mine) == 2 else None
    found["curve"] = list(bench.curve(sizes, lengths, ways, device, engine)) if lengths else []
    return found


def _print(found: dict[str, Any], sizes: Any, budget: float | None) -> None:
    from .memory import least

    for way in ("folded", "remat"):
        rows = [
            (way, each.part, _mib(each.kept), _mib(each.at_peak), "" if each.floor is None else _mib(each.floor))
            for each in found[way]
        ]
        kept, at_peak = (_mib(sum(getattr(each, name) for each in found[way])) for name in ("kept", "at_peak"))
        rows.append((way, "total", kept, at_peak, _mib(least(found[way]))))
        table(f"{sizes.rows} x {sizes.tokens} tokens, MiB", ("way", "part", "kept", "at peak", "floor"), rows)
    _print_peaks(found["peaks"])
    if found["curve"]:
        _print_peaks(found["curve"])
    for way, rows in found["largest"].items():
        note(f"{way}: {'no microbatch fits' if rows is None else f'at most {rows} rows fit'} {budget} GiB")


def _print_peaks(peaks: Sequence[Any]) -> None:
    head = ("way", "rows", "tokens", "peak MiB", "before the step", "engine", "note")
    rows = [
        (p.way, str(p.rows), str(p.tokens), "" if p.peak is None else _mib(p.peak), _mib(p.resting), p.engine, p.error)
        for p in peaks
    ]
    table("peaks", head, rows)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f}"


@contextlib.contextmanager
def no_room(model: str) -> Iterator[None]:
    """Sizes that torch cannot make, or that do not fit, are one line and exit code 1."""
    try:
        yield
    except OpakeError:
        raise
    except RuntimeError as error:
        fail(f"{model} cannot be measured at these sizes: {str(error).strip()}")
        raise typer.Exit(1) from error


def setting(text: str) -> tuple[str, Any]:
    """`name=value` as a pair, the value read as JSON where it is some."""
    name, sign, value = text.partition("=")
    if not sign:
        raise ValueError(f"--size {text!r}: give it as name=value")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
