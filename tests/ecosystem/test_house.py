"""What the house promises those who work in it or trust it: forms, fragments; no network, pickle or telemetry."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from importlib import resources
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))
SOURCES = [file for part in ("core", "families", "kernels") for file in sorted((ROOT / part).rglob("*.py"))]
# what opens a connection or runs what it reads
REFUSED = {
    "pickle",
    "cPickle",
    "dill",
    "shelve",
    "marshal",
    "socket",
    "ssl",
    "http",
    "urllib",
    "requests",
    "httpx",
    "ftplib",
}


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: "/".join(file.parts[-2:]))
def test_nothing_opens_a_connection_or_unpickles(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        assert not REFUSED & {name.partition(".")[0] for name in names}, f"{file.name} imports {names}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            safe = [ast.unparse(word.value) for word in node.keywords if word.arg == "weights_only"]
            assert safe == ["True"], f"{file.name}:{node.lineno}: torch.load without weights_only=True"


@pytest.mark.parametrize("file", FORMS, ids=lambda file: file.stem)
def test_issue_forms_ask_for_the_doctor(file: Path) -> None:
    form = yaml.safe_load(file.read_text())
    (doctor,) = [field for field in form["body"] if field["id"] == "doctor"]
    assert "opake doctor" in doctor["attributes"]["label"]
    assert doctor["validations"]["required"]


def test_hooks_before_a_commit_are_the_quick_part_of_the_check() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    for hook in repository["hooks"]:
        program = Path(hook["entry"].split()[1] if "python" in hook["entry"] else hook["entry"].split()[0]).name
        assert program in makefile, f"{hook['id']} runs {program}, which make check does not"


def test_fragments_are_well_formed() -> None:
    assert tool("changelog").problems(ROOT / "changelog.d") == []


def test_bad_fragments_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.feature.md").write_text("text")
    (tmp_path / "y.fixed.md").write_text("- a bullet")
    (tmp_path / "z.added.md").write_text(" ")
    found = tool("changelog").problems(tmp_path)
    assert [line.partition(":")[0] for line in found] == ["x.feature.md", "y.fixed.md", "z.added.md"]


def test_a_release_turns_fragments_into_a_section(tmp_path: Path) -> None:
    (tmp_path / "changelog.d").mkdir()
    for name, text in {"b.fixed": "Mended.", "a.added": "New,\nin two lines.", "c.added": "Newer."}.items():
        (tmp_path / "changelog.d" / f"{name}.md").write_text(text + "\n")
    (tmp_path / "changelog.d" / "README.md").touch()
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n## 0.1.0\n\n- first\n")
    tool("changelog").release(tmp_path, "0.2.0", "2026-12-01")
    assert (tmp_path / "CHANGELOG.md").read_text() == (
        "# Changelog\n\n## Unreleased\n\n## 0.2.0 - 2026-12-01\n\n### Added\n\n- New,\n  in two lines.\n- Newer.\n"
        "\n### Fixed\n\n- Mended.\n\n## 0.1.0\n\n- first\n"
    )
    assert [file.name for file in (tmp_path / "changelog.d").iterdir()] == ["README.md"]
    with pytest.raises(SystemExit, match=r"none '0\.2\.0' yet"):
        tool("changelog").release(tmp_path, "0.2.0", "2026-12-01")


def test_the_page_about_upgrades_shows_the_matrix() -> None:
    rows = json.loads((resources.files("opake") / "data" / "tested.json").read_text())
    text = (ROOT / "docs" / "howto" / "upgrade.md").read_text()
    shown = re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", text, re.MULTILINE)
    assert shown == [(row["target"], row["python"]) for row in rows]
