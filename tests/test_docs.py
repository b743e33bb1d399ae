"""The documentation cannot rot: its code runs, and what it must name it names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import typer.main

import opake_kernels
from opake import cli, errors, hookspecs, records, registry
from opake.patches import restore_runtime
from opake.patching.flags import FLAGS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
# a reader sees why; it stands in the paragraph before the block
NOT_RUN = "Not run by the tests"


class Block(NamedTuple):
    """A fenced block of a page, the line it begins on, and whether the page says that it is not run."""

    language: str
    title: str | None
    code: str
    line: int
    runs: bool


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def blocks(file: Path) -> Iterator[Block]:
    text = file.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        before = text[: found.start()].rstrip().rpartition("\n\n")[2]
        line = text.count("\n", 0, found.start("code"))
        yield Block(found["language"], found["title"], found["code"], line, NOT_RUN not in before)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory in which a page runs; its titled blocks are modules there."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    restore_runtime()
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.stem)
def test_every_block_of_a_page_runs_in_order(file: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, object] = {"__name__": "__docs__"}
    for block in blocks(file):
        where = f"{file.name}:{block.line}"
        assert block.language in ("python", "console", "toml", "json", "text"), f"{where}: what is {block.language!r}?"
        if block.title:
            (here / block.title).write_text(block.code, encoding="utf-8")
        elif block.runs and block.language == "python":
            # blank lines in front, so that a traceback shows the line of the page
            exec(compile("\n" * block.line + block.code, str(file), "exec"), namespace)
        elif block.runs and block.language == "console":
            for line in block.code.splitlines():
                run(line, where)
        elif block.language in ("toml", "json"):
            (tomllib.loads if block.language == "toml" else json.loads)(block.code)
    capsys.readouterr()


def run(line: str, where: str) -> None:
    """A line of a console block: a command of ours, or a make target, which is not made here."""
    if line.startswith("make "):
        return
    assert line.startswith("$ opake "), f"{where}: {line!r} is not run, and the page does not say why"
    with pytest.raises(SystemExit) as done:
        cli.main(shlex.split(line)[2:])
    assert done.value.code == 0, f"{where}: {line}"


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.stem)
def test_no_code_hides_in_an_indented_block(file: Path) -> None:
    text = FENCE.sub("", file.read_text(encoding="utf-8"))
    for before, line in itertools.pairwise(re.sub(r"^\s+$", "", text, flags=re.MULTILINE).split("\n")):
        assert before or not line.startswith("    ") or "!!!" in text, f"{file.name}: {line!r} is code, and not run"


def test_make_targets_that_are_named_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = {name for file in PAGES for name in re.findall(r"\bmake ([a-z]+)\b(?=`|$)", file.read_text(), re.MULTILINE)}
    assert {"demo", "test"} <= named
    for name in named:
        assert re.search(rf"^{name}:", makefile, re.MULTILINE), f"make {name} is in the docs, not in the Makefile"


@pytest.mark.parametrize("name", ["plugins.md", "architecture.md"])
@pytest.mark.parametrize("hook", hookspecs.HOOKS)
def test_every_hook_is_documented_with_its_arguments(hook: str, name: str) -> None:
    arguments = ", ".join(inspect.signature(getattr(hookspecs, hook)).parameters)
    assert f"`{hook}({arguments})`" in page(name)


def test_every_flag_is_documented_with_its_default_and_scope() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|$", page("flags.md"), re.MULTILINE))
    assert list(rows) == list(FLAGS)
    for name, flag in FLAGS.items():
        default, scopes, _ = rows[name].split(" | ")
        assert scopes == ", ".join(flag.scopes)
        assert not flag.group or default == f"`{flag.group}`"


def verbs() -> dict[str, list[str]]:
    """{`families list`: its options}."""
    root = typer.main.get_command(cli.app)
    found = {}
    for name, command in root.commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        for verb, leaf in inner.items() if inner else [("", command)]:
            options = [option for parameter in leaf.params for option in parameter.opts if option.startswith("--")]
            found[f"{name} {verb}".strip()] = [option for option in options if option != "--help"]
    return found


@pytest.mark.parametrize(
    ("verb", "options"), verbs().items(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_verb_is_documented_with_its_options(verb: str, options: list[str]) -> None:
    sections = dict(re.findall(r"^## opake ([a-z ]+)\n(.*?)(?=^## |\Z)", page("cli.md"), re.MULTILINE | re.DOTALL))
    assert verb in sections
    for option in options:
        assert option in sections[verb], f"opake {verb} {option} is not documented"


def test_no_verb_is_documented_that_does_not_exist() -> None:
    assert set(re.findall(r"^## opake ([a-z ]+)$", page("cli.md"), re.MULTILINE)) == set(verbs())


def test_the_page_of_families_is_what_the_plugins_say() -> None:
    if not all(claim.status == "ok" for claim in registry.listed() if claim.source == registry.OURS):
        pytest.skip("the installed Transformers lacks a model whose plan the page shows")
    spec = importlib.util.spec_from_file_location("families_page", ROOT / "tools" / "families_page.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert page("families.md") == tool.page(), "run: make families"


def test_every_family_is_documented() -> None:
    ours = {claim.name for claim in registry.listed() if claim.source == registry.OURS}
    assert ours <= set(re.findall(r"^\| `(\w+)` \|", page("families.md"), re.MULTILINE))


def test_every_record_is_named_in_the_guide_for_plugins() -> None:
    for name in set(records.__all__) - {"hookimpl", "Skip"}:
        assert f"`{name}`" in page("plugins.md"), name


def test_the_plugin_in_the_guide_is_the_example() -> None:
    (code,) = [block.code for block in blocks(ROOT / "docs" / "plugins.md") if block.title == "opake_helium.py"]
    assert code == (ROOT / "plugins-example" / "opake_helium.py").read_text(encoding="utf-8")
    assert len(code.splitlines()) < 30


def test_every_page_is_in_the_navigation_and_every_link_leads_somewhere() -> None:
    navigation = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(navigation) == sorted(str(f.relative_to(ROOT / "docs")) for f in (ROOT / "docs").rglob("*.md"))
    for file in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", file.read_text()):
            assert (file.parent / target).exists(), f"{file.name} links to {target}"


def test_every_error_is_drawn_in_the_tree() -> None:
    tree = errors.__doc__ or ""
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, Exception | Warning) and value.__module__ == errors.__name__:
            assert re.search(rf"\b{name}\b", tree), name


def test_every_name_of_ours_that_a_page_mentions_exists() -> None:
    known = {*opake_kernels.__all__, *hookspecs.HOOKS, "opake_kernels", "opake_families", "opake_helium"}
    for file in PAGES:
        named = set(re.findall(r"`(opake_\w+)`", file.read_text(encoding="utf-8")))
        assert named <= known, f"{file.name} names {sorted(named - known)}"


PUBLIC = (
    "opake.collate",
    "opake.explain",
    "opake.functional",
    "opake.lm_head",
    "opake.lora",
    "opake.lora.axolotl",
    "opake.patches",
    "opake.patches.kernels",
    "opake.scaffold",
    "opake.trainer",
)
# whole modules, every public name of which the reference shows
WHOLE = ("opake.errors", "opake.hookspecs", "opake.records", "opake.checking.isolated")


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_in_the_reference(module: str) -> None:
    text, shown = page("api.md"), module.replace("opake.patches.kernels", "opake_kernels")
    (members,) = re.findall(rf"^::: {re.escape(shown)}\n    options:\n      members: \[(.*?)\]$", text, re.MULTILINE)
    assert set(members.split(", ")) == set(importlib.import_module(module).__all__)


@pytest.mark.parametrize("module", WHOLE)
def test_whole_modules_are_in_the_reference(module: str) -> None:
    assert re.search(rf"^::: {re.escape(module)}$", page("api.md"), re.MULTILINE)


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_says_what_it_is(module: str) -> None:
    loaded = importlib.import_module(module)
    for name in loaded.__all__:
        value = getattr(loaded, name)
        if callable(value):
            assert inspect.getdoc(value), f"{module}.{name} has no docstring"


@pytest.mark.parametrize("name", opake_kernels.__all__)
def test_every_op_tells_shapes_and_source(name: str) -> None:
    text = inspect.getdoc(getattr(opake_kernels, name)) or ""
    refers = "arguments as in" in text.lower() or "as in `opake_" in text
    assert refers or re.search(r"\((\.\.\.|[A-Z])", text), f"{name}: no shapes"
    sources = re.findall(r"^\| (`opake_.*?) \| (.*?) \|$", page("api.md"), re.MULTILINE)
    assert any(f"`{name}`" in ops for ops, _ in sources), f"{name}: no source in the reference"
