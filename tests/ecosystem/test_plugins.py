"""The example plugins as a third party ships them: wheels, installed into an environment of their own, and removed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "plugins-example"
# distribution: its directory, and what it adds to the list of families
PLUGINS = {"opake-helium": (EXAMPLES, "helium"), "opake-nemotron": (EXAMPLES / "opake-nemotron", "nemotron")}


@pytest.mark.parametrize("distribution", PLUGINS)
def test_a_plugin_is_installed_passes_its_tests_and_is_removed(
    distribution: str, here: Any, clean: Any, build: Any, run_its_tests: Any
) -> None:
    source, name = PLUGINS[distribution]
    pip = ["-m", "pip", "--python", str(clean.python)]
    before = clean.families()
    assert name not in before
    here.run(*pip, "install", "-q", "--no-deps", "--no-index", str(build(source)))
    assert clean.families() == {**before, name: ("ok", distribution)}
    run_its_tests()
    here.run(*pip, "uninstall", "-q", "-y", distribution)
    assert clean.families() == before
