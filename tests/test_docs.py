"""The documentation cannot rot: its code runs, and what it must name it names."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from opake import cli, errors, hookspecs, records, registry
from opake.patches import restore_runtime
from opake.patching.flags import FLAGS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def blocks(file: Path, language: str) -> Iterator[tuple[str | None, str, int]]:
    """(title, code, line) of every fenced block of a language."""
    text = file.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        if found["language"] == language:
            yield found["title"], found["code"], text.count("\n", 0, found.start("code"))


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for the titled blocks of a page, importable while the page runs."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    restore_runtime()
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("file", [f for f in PAGES if list(blocks(f, "python"))], ids=lambda file: file.name)
def test_python_blocks_run(file: Path, modules: Path) -> None:
    namespace: dict[str, object] = {"__name__": "__docs__"}
    for title, code, line in blocks(file, "python"):
        if title:
            (modules / title).write_text(code, encoding="utf-8")
        else:
            # blank lines in front, so that a traceback shows the line of the page
            exec(compile("\n" * line + code, str(file), "exec"), namespace)


@pytest.mark.parametrize(
    "command",
    [
        line.removeprefix("$ ")
        for file in PAGES
        for _, code, _ in blocks(file, "console")
        for line in code.splitlines()
        if line.startswith("$ opake")
    ],
)
def test_console_commands_succeed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(command.split()[1:])
    assert done.value.code == 0, capsys.readouterr().err


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
    (code,) = [code for title, code, _ in blocks(ROOT / "docs" / "plugins.md", "python") if title == "opake_helium.py"]
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
