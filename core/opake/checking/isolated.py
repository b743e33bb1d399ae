"""A registry that sees the plugins of one test and no other: throwaway distributions in a temporary directory.

The plugins are real ones, with packaging metadata and modules that are imported from disk, so that a test walks the
road of a third party. Nothing is installed; on leaving, `sys.path` and `sys.modules` are as before.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from opake import registry


@dataclass(frozen=True)
class Distribution:
    """What a throwaway distribution declares: entry points by model_type, and modules by name with their source."""

    name: str
    version: str = "1.0"
    families: Mapping[str, str] = field(default_factory=dict)
    extensions: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)

    def write(self, site: Path) -> None:
        """Lay the modules and the dist-info out as an installer would."""
        for module, source in self.modules.items():
            file = site / (module.replace(".", "/") + ".py")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(source), encoding="utf-8")
        info = site / f"{self.name.replace('-', '_')}-{self.version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {self.name}\nVersion: {self.version}\n")
        (info / "entry_points.txt").write_text(
            _section(registry.FAMILIES, self.families) + _section(registry.EXTENSIONS, self.extensions)
        )


@contextlib.contextmanager
def isolated_registry(*distributions: Distribution, **name_to_module: str) -> Iterator[Path]:
    """The registry as if only these plugins were installed; yields the directory they were written to.

    distributions: written one by one. name_to_module: model_type to the dotted name of a module that can be imported,
    claimed by a distribution named `isolated`.

        with isolated_registry(llama="opake_families.llama"):
            assert [claim.name for claim in registry.listed()] == ["llama"]
    """
    if name_to_module:
        distributions = (*distributions, Distribution("isolated", families=name_to_module))
    with tempfile.TemporaryDirectory(prefix="opake-isolated-") as directory:
        site = Path(directory).resolve()
        for distribution in distributions:
            distribution.write(site)
        with _only(site):
            yield site


@contextlib.contextmanager
def _only(site: Path) -> Iterator[None]:
    before = registry._search_path
    registry._search_path = [str(site)]
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    registry.refresh()
    try:
        yield
    finally:
        registry._search_path = before
        sys.path.remove(str(site))
        registry.refresh()
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if file and Path(file).is_relative_to(site):
                del sys.modules[name]


def _section(group: str, entries: Mapping[str, str]) -> str:
    return f"[{group}]\n" + "".join(f"{name} = {module}\n" for name, module in entries.items()) + "\n"
