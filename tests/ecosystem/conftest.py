"""Environments of their own for plugins: made in a second, with the packages of the environment that runs the tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Environment:
    """A virtual environment that sees the packages of this one, so that no second torch is installed."""

    python: Path

    def run(self, *arguments: str, cwd: Path | None = None, **extra: str) -> subprocess.CompletedProcess[str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")} | extra
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


@pytest.fixture
def here() -> Environment:
    """The environment that runs the tests."""
    return Environment(Path(sys.executable))


@pytest.fixture
def build(here: Environment, tmp_path: Path) -> Callable[[Path], Path]:
    """Builds the wheel of a directory, from a copy, without the network."""

    def wheel(source: Path) -> Path:
        copy = tmp_path / "source"
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("opake-*", "dist", "__pycache__", ".*"))
        options = ["-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(tmp_path)]
        here.run("-m", "pip", "wheel", *options, str(copy))
        return next(tmp_path.glob("*.whl"))

    return wheel


@pytest.fixture
def run_its_tests(clean: Environment, tmp_path: Path) -> Callable[..., None]:
    """Runs the tests of the distribution that `build` built, away from its source, in the clean environment."""

    def run(*options: str) -> None:
        tests = tmp_path / "tests"
        shutil.copytree(tmp_path / "source" / "tests", tests)
        settings = ["-c", str(tmp_path / "source" / "pyproject.toml")]
        pytest_ = ["-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *settings]
        clean.run(*pytest_, *options, str(tests), cwd=tmp_path)
        for kernel in tests.glob("test_layer_norm.py"):
            clean.run(*pytest_, str(kernel), cwd=tmp_path, TRITON_INTERPRET="1")

    return run
