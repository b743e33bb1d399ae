"""`opake families`: what there is, what a family plans, whether it is right on a tiny model, and a new one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from opake import registry
from opake.cli.output import examples, fail, group, json_out, note, progress, table
from opake.errors import OpakeError, UnknownFamily

app = group(help="List, show, check and write the model families that plugins provide.")

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command("list", epilog=examples("families list", "families list --json", "families list --all"))
def list_families(
    as_json: Json = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Also the causal language models of Transformers without a family.")
    ] = False,
) -> None:
    """List the families with their status and where they come from.

    Reads packaging metadata only: no plugin, PyTorch or Transformers is imported (with --all, Transformers is).
    """
    rows = [_as_dict(claim) for claim in registry.listed()]
    head = ("model_type", "status", "source", "version", "module")
    if everything:
        known = {row["name"] for row in rows}
        rows = [{**row, "reason": ""} for row in rows] + _generic(known)
        head = (*head, "reason")
    if as_json:
        json_out(rows)
    else:
        table("families", head, [tuple(r.values()) for r in rows])


@app.command("show", epilog=examples("families show llama", "families show llama --json"))
def show_family(model_type: str, as_json: Json = False) -> None:
    """Show the plan of one family: every record, the hook that returns it and its line of source.

    Imports that family and its Transformers modeling module, and builds no model.
    """
    from opake import planning

    family, planned = planning.plan(model_type)
    rows = [
        {
            "hook": row.hook,
            "record": str(row.record),
            "flag": getattr(row.record, "flag", ""),
            "source": row.source,
            "path": row.path,
        }
        for row in planned
    ]
    if as_json:
        claims = {"extensions": [_as_dict(claim) for claim in family.extensions]}
        json_out({**_as_dict(family.claim), **claims, "records": rows})
        return
    for claim in (family.claim, *family.extensions):
        note(str(claim))
    head = ("hook", "record", "flag", "source")
    table(f"plan of {model_type}", head, [tuple(row[key] for key in head) for row in rows])
    note("Attention, masks, the batch dimension, the cache, the loss and checkpointing are the core's own.")


@app.command(
    "check", epilog=examples("families check llama mistral", "families check --all", "families check --generic olmo")
)
def check_families(
    model_types: Annotated[list[str] | None, typer.Argument(metavar="MODEL_TYPE")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every family that is listed and not blocked.")] = False,
    generic: Annotated[bool, typer.Option("--generic", help="Also take a model_type that has no family.")] = False,
) -> None:
    """Check families on tiny random models: per-example gradients against a loop, then whether restore is complete.

    Exits with 1 and the reasons if any check fails.
    """
    names = _chosen(model_types or [], everything, generic)
    from opake.checking import family

    with progress("checking", len(names)) as step:
        outcomes = []
        for name in names:
            step(name)
            outcomes.append(family.check_family(name))
    head = ("model_type", "family", "model", "attention", *family.CASES, "restored", "result")
    table("largest relative error of a per-example gradient", head, [outcome.cells() for outcome in outcomes])
    for outcome in outcomes:
        for remark in outcome.notes:
            note(f"{outcome.model_type}: {remark}")
    failures = [f"{outcome.model_type}: {reason}" for outcome in outcomes for reason in outcome.failures]
    for failure in failures:
        fail(failure)
    if failures:
        raise typer.Exit(1)


@app.command(
    "new", epilog=examples("families new arcee opake-arcee", "families new seed_oss plugin --name my-seed-oss")
)
def new_family(
    model_type: str,
    directory: Annotated[Path, typer.Argument(help="Where to write; made if it is not there, else empty.")],
    name: Annotated[str | None, typer.Option(help="Name of the distribution. Default: opake-MODEL-TYPE.")] = None,
) -> None:
    """Write a plugin for a causal language model of Transformers: a distribution with a module, tests and packaging.

    What the model's classes compute is found by running them on a tiny random model; what could not be proven stands
    in the module's docstring. Exits with 1 if the result does not pass the check of `opake families check`.
    """
    from opake import scaffold

    made = scaffold.new_family(model_type, directory, name)
    for file in made.files:
        note(f"wrote {file}")
    found = made.declaration
    note(f"{len(found.lines)} records declared, {len(found.left_out)} left out")
    for reason in found.left_out:
        note(f"  left out: {reason}")
    from opake.checking import family

    head = ("model_type", "family", "model", "attention", *family.CASES, "restored", "result")
    table("largest relative error of a per-example gradient", head, [made.outcome.cells()])
    for failure in made.outcome.failures:
        fail(f"{model_type}: {failure}")
    if made.outcome.failures:
        raise typer.Exit(1)
    for claim in registry.claims(name=model_type):
        block = f"{registry.BLOCK}={claim.source}:{model_type}"
        note(f"{claim.source} {claim.version} serves {model_type} already: with both installed, set {block}")
    note(f"next: pip install -e {directory} && opake families show {model_type}")


def _chosen(model_types: list[str], everything: bool, generic: bool) -> list[str]:
    """The model types to check; a name without a family is refused before anything is imported."""
    known = dict.fromkeys(claim.name for claim in registry.claims())
    if everything:
        skipped = {claim.name: claim.status for claim in registry.listed() if claim.status.startswith("needs")}
        for name, status in skipped.items():
            note(f"{name}: skipped, {status}")
        model_types = [*model_types, *(name for name in known if name not in skipped)]
    if not model_types and not everything:
        raise typer.BadParameter("name a MODEL_TYPE, or pass --all")
    for name in model_types:
        if name not in known and not generic:
            try:
                registry.load(name)
            except UnknownFamily as error:
                raise UnknownFamily(f"{error} (--generic checks it without a family)") from None
            except OpakeError:
                continue
    return list(dict.fromkeys(model_types))


def _as_dict(claim: registry.Claim) -> dict[str, Any]:
    return {key: getattr(claim, key) for key in ("name", "status", "source", "version", "module")}


def _generic(known: set[str]) -> list[dict[str, Any]]:
    """The causal language models without a family, each with the answer that was recorded for it."""
    from importlib.metadata import version

    from transformers.models.auto import modeling_auto

    from opake.checking import answers

    models = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    installed = version("transformers")
    tested = answers.for_version(installed)
    rows = []
    for name in sorted(set(models) - known):
        status, reason = _told(tested.types.get(name), tested.transformers, installed)
        where = {"status": status, "source": "transformers", "version": installed, "module": str(models[name])}
        rows.append({"name": name, **where, "reason": reason})
    return rows


def _told(answer: Any, tested: str, installed: str) -> tuple[str, str]:
    """Status and reason of a model type without a family."""
    elsewhere = "" if tested == installed else f" on transformers {tested}; the installed {installed} was not tested"
    if answer is None:
        return "not tried", f"no answer is recorded{elsewhere or f' for transformers {tested}'}"
    if not answer.proven:
        return "not supported", answer.reason + (f" ({elsewhere.strip()})" if elsewhere else "")
    return "generic", f"proven{elsewhere or f' on transformers {tested}'}{answer.note and f', {answer.note}'}"
