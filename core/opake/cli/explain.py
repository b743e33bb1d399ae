"""`opake explain`: what would be patched and what a step would cost, from a config alone."""

from __future__ import annotations

from typing import Annotated

import typer

from opake.cli.output import examples, note, table

EPILOG = examples(
    "explain config.json", "explain Qwen/Qwen2-0.5B --rank 0 --tokens 512", "explain model-dir --cuda --json"
)


def explain(
    model: Annotated[str, typer.Argument(help="A directory, a config.json, or a name on the hub.")],
    rank: Annotated[int, typer.Option(min=0, help="Rank of LoRA on all linear layers; 0 trains everything.")] = 16,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a row.")] = 1024,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a microbatch.")] = 8,
    dtype: Annotated[str, typer.Option(help="Of the weights: bfloat16, float16 or float32.")] = "bfloat16",
    cuda: Annotated[bool, typer.Option("--cuda", help="As if this machine had a CUDA device.")] = False,
    rate: Annotated[float, typer.Option(min=0.001, help="Sustained TFLOP/s to tell the time by.")] = 250.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Tell which patches a model would get, which not and why, and the memory and time of a step. Loads no weights."""
    from opake.errors import InputError
    from opake.explain import explain as explained

    if dtype not in ("bfloat16", "float16", "float32"):
        raise InputError(f"--dtype is bfloat16, float16 or float32, not {dtype!r}")
    found = explained(model, rank=rank, tokens=tokens, dtype=dtype, cuda=cuda)
    if as_json:
        print(found.to_json())
        return
    note(str(found.report).replace("  (family:", f", model_type {found.model_type}  (family:", 1))
    note(f"\nper-example gradients by the {found.engine} engine: {found.reason}\n")
    table("cost of a step", ("quantity", "value", "remark"), list(found.figures(rows, rate)))
