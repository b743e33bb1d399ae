"""`opake demo`: a thin call into `opake.demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from opake.cli.output import examples

EPILOG = examples("demo", "demo --model Qwen/Qwen2-0.5B --text my.txt --steps 50")


def demo(
    model: Annotated[
        str | None, typer.Option(help="A causal language model: a name or a directory. Default: SmolLM2-135M-Instruct.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Text to train on. Default: Python's help topics.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of sampling, noise and adapters.")] = 0,
) -> None:
    """Fine-tune a real model with LoRA and DP-SGD for a few steps, and verify a microbatch against a loop."""
    from opake.demo import run

    raise typer.Exit(run(model=model, text=text, steps=steps, seed=seed))
