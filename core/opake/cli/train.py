"""`opake train`: a thin call into `opake.finetune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from opake.cli.output import examples

EPILOG = examples(
    "train --dataset notes.jsonl --target-epsilon 8",
    "train --model Qwen/Qwen2-0.5B --dataset notes.jsonl --target-epsilon 3 --batch-size 256 --plot run.png",
    "train --dataset notes.jsonl --target-epsilon 8 --output opake-adapter --resume",
)


def train(
    dataset: Annotated[str, typer.Option(help="A .jsonl file, a text file, or the name of a data set on the Hub.")],
    model: Annotated[
        str | None, typer.Option(help="A causal language model: a name or a directory. Default: SmolLM2-135M-Instruct.")
    ] = None,
    target_epsilon: Annotated[float | None, typer.Option(help="Spend at most this; the noise follows.")] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Instead: the noise itself, in clipping norms.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Default: N ** -1.1 for N rows.")] = None,
    clip_norm: Annotated[float, typer.Option(help="Largest norm of the gradient of a row.")] = 1.0,
    batch_size: Annotated[float, typer.Option(help="Rows that a step draws on average.")] = 32,
    microbatch_size: Annotated[int, typer.Option(help="Rows at a time: what fits into memory.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps.")] = 100,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a row; longer rows are cut.")] = 128,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW, falling linearly to 0.")] = 1e-3,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the LoRA adapters.")] = 8,
    field: Annotated[str, typer.Option(help="Where the text is in a line or an entry.")] = "text",
    output: Annotated[Path, typer.Option(help="Folder for the adapter, the privacy card and checkpoints.")] = Path(
        "opake-adapter"
    ),
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in the folder.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw loss and epsilon into this file (matplotlib).")] = None,
    noise_seed: Annotated[int | None, typer.Option(help="For tests only: a public seed protects nobody.")] = None,
) -> None:
    """Fine-tune a model with LoRA and differential privacy: one row of the data is what is protected.

    Shows epsilon while it is spent, and saves the adapter in PEFT's format with a privacy card beside it. Every tenth
    row is held out to measure the loss; held-out rows are not protected.
    """
    asked = dict(locals())
    from opake.finetune import Plan, run

    run(Plan(**asked))
