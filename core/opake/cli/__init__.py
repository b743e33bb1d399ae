"""The command `opake`. Importing it imports nothing heavy: what a verb needs it imports itself.

Exit codes: 0 all is well, 1 a check failed, 2 the command was used wrongly.
"""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from opake import __version__
from opake.bench import cli as bench
from opake.cli import demo, doctor, explain, families, train
from opake.cli.output import fail, group
from opake.errors import InputError, OpakeError, OptionTypeError, UnknownFamily, UnknownOption

USAGE = (UnknownFamily, UnknownOption, OptionTypeError, InputError)

app = group(name="opake", help="Exact per-example gradients and fused kernels for Hugging Face Transformers models.")
app.add_typer(families.app, name="families")
app.add_typer(bench.app, name="bench")
app.command("doctor", epilog=doctor.EPILOG)(doctor.doctor)
app.command("explain", epilog=explain.EPILOG)(explain.explain)
app.command("demo", epilog=demo.EPILOG)(demo.demo)
app.command("train", epilog=train.EPILOG)(train.train)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"opake {__version__}")
        raise typer.Exit


# the option's callback does the work: it runs before a missing verb is noticed
@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit; an error of opake's own is one line on stderr, not a traceback."""
    try:
        app(args=arguments, prog_name="opake")
    except OpakeError as error:
        fail(str(error))
        sys.exit(2 if isinstance(error, USAGE) else 1)
    sys.exit(0)
