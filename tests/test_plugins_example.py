"""The example plugin is a real distribution: its own tests pass, found through its own entry point."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path

import pytest

from opake import registry
from opake.hookspecs import HOOKS
from opake.testing.isolated import Distribution, isolated_registry

EXAMPLE = Path(__file__).parents[1] / "plugins-example"


@pytest.fixture
def installed():
    """The example as pip would install it, alone in the registry."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    modules = {"opake_helium": (EXAMPLE / "opake_helium.py").read_text()}
    entries = project["entry-points"][registry.FAMILIES]
    with isolated_registry(Distribution(project["name"], project["version"], entries, modules=modules)):
        yield


def of_the_example():
    spec = importlib.util.spec_from_file_location("test_helium", EXAMPLE / "tests" / "test_helium.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [value for name, value in vars(module).items() if name.startswith("test_")]


@pytest.mark.parametrize("test", of_the_example(), ids=lambda test: test.__name__)
@pytest.mark.usefixtures("installed")
def test_its_own_tests_pass(test) -> None:
    test()


@pytest.mark.usefixtures("installed")
def test_it_serves_the_hooks_it_claims_and_imports_no_torch() -> None:
    family = registry.load("helium")
    assert {hook for hook in HOOKS if hasattr(family.plugins[0].target, hook)} == {
        "opake_kernel_patches",
        "opake_lora_fusions",
    }
    source = (EXAMPLE / "opake_helium.py").read_text()
    assert "import torch" not in source
    assert "transformers" not in source
