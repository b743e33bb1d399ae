"""What is declared, what lies on disk and what an installed opake shows are the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from opake import __version__, registry

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def entry_points(group: str) -> dict[str, str]:
    return {e.name: e.value for e in metadata.distribution("opake").entry_points.select(group=group)}


def test_installed_entry_points_are_those_of_pyproject() -> None:
    declared = PROJECT["project"]["entry-points"][registry.FAMILIES]
    assert entry_points(registry.FAMILIES) == declared, "pyproject.toml changed: install again"
    assert entry_points("console_scripts") == PROJECT["project"]["scripts"]


def test_every_family_file_is_declared_and_every_declaration_has_its_file() -> None:
    declared = set(PROJECT["project"]["entry-points"][registry.FAMILIES].values())
    files = {f"opake_families.{file.stem}" for file in (ROOT / "families" / "opake_families").glob("[!_]*.py")}
    assert declared == files


def test_our_families_are_listed_as_ours() -> None:
    ours = {claim.name: claim.module for claim in registry.listed() if claim.source == "opake"}
    assert ours == PROJECT["project"]["entry-points"][registry.FAMILIES]


@pytest.mark.parametrize("name", sorted(PROJECT["project"]["entry-points"][registry.FAMILIES]))
def test_each_family_loads_alone_and_imports_nothing_heavy(name: str) -> None:
    heavy = "{'torch', 'transformers', 'triton', 'peft', 'numpy', 'opake_kernels'}"
    code = f"import sys; from opake import registry; registry.load({name!r}); print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("package", PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
def test_packages_are_typed_and_complete(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()
    assert (ROOT / package / "__init__.py").is_file()


def test_version_is_the_installed_one_and_in_the_changelog() -> None:
    assert metadata.version("opake") == __version__
    headings = re.findall(r"^## \[?([^\]\s]+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert __version__ in headings


def test_importing_opake_imports_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import opake; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['opake']"


def test_constraints_stay_within_the_ranges_that_opake_declares() -> None:
    from packaging.requirements import Requirement

    declared = {r.name: r for r in map(Requirement, PROJECT["project"]["dependencies"])}
    pins = [Requirement(line) for line in lines(ROOT / "constraints.txt")]
    assert "torch" in {pin.name for pin in pins}
    for pin in pins:
        (only,) = pin.specifier
        assert only.operator == "=="
        if pin.name in declared:
            assert declared[pin.name].specifier.contains(only.version), f"{pin} is outside {declared[pin.name]}"


def test_every_make_target_is_explained() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, flags=re.MULTILINE)
    assert phony is not None
    targets = [name for name in phony.group(1).split() if name != "help" and not name.startswith("$")]
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, env=clean_env())
    assert [line.split()[1] for line in done.stdout.splitlines()] == targets


def test_an_old_python_is_refused_with_a_sentence(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo "Python 3.10.1" && exit 0\nexit 1\n')
    old.chmod(0o755)
    done = subprocess.run(
        ["make", f"PYTHON={old}", f"VENV={tmp_path}/venv", "check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=clean_env(),
    )
    assert done.returncode == 2
    assert f"opake needs Python >= 3.11; {old} is Python 3.10.1" in done.stdout


def lines(file: Path) -> list[str]:
    return [line for line in file.read_text().splitlines() if line and not line.startswith("#")]


def clean_env() -> dict[str, str]:
    """Without what a make that runs this suite hands down to a make inside it."""
    return {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
