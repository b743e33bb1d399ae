"""The example plugins as a third party ships them: wheels, installed into an environment of their own, and removed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "plugins-example"
# distribution: its directory, and what it adds to the list of families
PLUGINS = {"opake-helium": (EXAMPLES, "helium"), "opake-nemotron": (EXAMPLES / "opake-nemotron", "nemotron")}


@dataclass(frozen=True)
class Environment:
    """A virtual environment that sees the packages of this one, so that no second torch is installed."""

    python: Path

    def run(self, *arguments: str, cwd: Path | None = None, **extra: str) -> subprocess.CompletedProcess[str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "PYTHON"))} | extra
        done = subprocess.run([self.python, *arguments], cwd=cwd, env=clean, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
        return done

    def families(self) -> dict[str, Any]:
        done = self.run("-m", "opake.cli", "families", "list", "--json")
        return {row["name"]: (row["status"], row["source"]) for row in json.loads(done.stdout)}


@pytest.fixture
def clean(tmp_path: Path) -> Environment:
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    # through addsitedir, so that an editable opake is seen as well
    (site / "packages.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return Environment(python)


@pytest.fixture(params=PLUGINS)
def wheel(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    source, _ = PLUGINS[request.param]
    copy = tmp_path / "source"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("opake-*", "dist", "__pycache__", ".*"))
    build = ["wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(tmp_path), str(copy)]
    Environment(Path(sys.executable)).run("-m", "pip", *build)
    return next(tmp_path.glob("opake_*.whl"))


def test_a_plugin_is_installed_passes_its_tests_and_is_removed(clean: Environment, wheel: Path, tmp_path: Path) -> None:
    distribution = wheel.name.partition("-")[0].replace("_", "-")
    _, name = PLUGINS[distribution]
    pip = ["-m", "pip", "--python", str(clean.python)]
    before = clean.families()
    assert name not in before
    Environment(Path(sys.executable)).run(*pip, "install", "-q", "--no-deps", "--no-index", str(wheel))
    assert clean.families() == {**before, name: ("ok", distribution)}

    tests = tmp_path / "tests"
    shutil.copytree(tmp_path / "source" / "tests", tests)
    settings = str(tmp_path / "source" / "pyproject.toml")
    pytest_ = [
        "-m",
        "pytest",
        "-q",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        "-c",
        settings,
    ]
    clean.run(*pytest_, str(tests), cwd=tmp_path)
    for kernel in tests.glob("test_layer_norm.py"):
        clean.run(*pytest_, str(kernel), cwd=tmp_path, TRITON_INTERPRET="1")

    Environment(Path(sys.executable)).run(*pip, "uninstall", "-q", "-y", distribution)
    assert clean.families() == before
