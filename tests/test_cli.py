"""The command line: output for people and programs, exit codes, and what a verb may import."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import typer.main

from opake import cli, registry
from opake.cli import doctor as doctor_verb
from opake.cli import output
from opake.testing.isolated import Distribution, isolated_registry

GOOD = """
from opake.records import RMSNorm, hookimpl

@hookimpl
def opake_kernel_patches(hf):
    yield RMSNorm(hf.LlamaRMSNorm)
"""
WRONG = GOOD.replace("LlamaRMSNorm", "LlamaRMSNrom")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    with pytest.raises(SystemExit) as done:
        cli.main(list(arguments))
    captured = capsys.readouterr()
    code = done.value.code
    assert isinstance(code, int)
    return code, captured.out, captured.err


def llama(source: str = GOOD, name: str = "fam") -> Distribution:
    module = name.replace("-", "_")
    return Distribution(name, families={"llama": module}, modules={module: source})


LIGHT = """
import sys
from opake import cli
try:
    cli.main(sys.argv[1:])
except SystemExit as done:
    heavy = {"torch", "transformers", "triton", "peft", "numpy", "opake_kernels"} & set(sys.modules)
    print(sorted(heavy), done.code, file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments",
    ["families list", "families list --json", "--version", "--help", "families check --help", "families show lama"],
)
def test_light_verbs_import_nothing_heavy(arguments: str) -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT, *arguments.split()], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] in ("[] 0", "[] 2")


def test_list_is_a_plain_table_away_from_a_terminal(capsys) -> None:
    with isolated_registry(llama(), Distribution("bad", families={"zz": "nowhere"})):
        code, out, _ = run(capsys, "families", "list")
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["model_type", "status", "source", "version", "module"],
        ["llama", "ok", "fam", "1.0", "fam"],
        ["zz", "broken", "bad", "1.0", "nowhere"],
    ]
    assert out.isascii()


def test_list_json_has_the_documented_keys(capsys) -> None:
    with isolated_registry(llama(), llama(name="fam-b")):
        code, out, _ = run(capsys, "families", "list", "--json")
    assert code == 0
    assert json.loads(out) == [
        {"name": "llama", "status": "conflict", "source": "fam", "version": "1.0", "module": "fam"},
        {"name": "llama", "status": "conflict", "source": "fam-b", "version": "1.0", "module": "fam_b"},
    ]


def test_list_all_adds_the_models_without_a_family(capsys) -> None:
    with isolated_registry(llama()):
        _, out, _ = run(capsys, "families", "list", "--json", "--all")
    rows = {row["name"]: row for row in json.loads(out)}
    assert rows["llama"]["status"] == "ok"
    assert rows["gpt2"]["status"] == "generic"
    assert rows["gpt2"]["source"] == "transformers"


def test_show_prints_the_plan_with_lines(capsys) -> None:
    with isolated_registry(llama()):
        code, out, _ = run(capsys, "families", "show", "llama")
    assert code == 0
    assert "family 'llama' (fam, from fam 1.0)" in out
    assert re.search(r"opake_kernel_patches +RMSNorm\(LlamaRMSNorm\) +rms_norm +fam\.py:6$", out, re.MULTILINE)


def test_show_json(capsys) -> None:
    extra = Distribution("ext", extensions={"llama": "ext_llama"}, modules={"ext_llama": GOOD})
    with isolated_registry(llama(), extra) as site:
        code, out, _ = run(capsys, "families", "show", "llama", "--json")
        path = str(site / "fam.py")
    shown = json.loads(out)
    assert code == 0
    assert (shown["name"], shown["source"], shown["module"]) == ("llama", "fam", "fam")
    assert [row["source"] for row in shown["extensions"]] == ["ext"]
    assert shown["records"][0] == {
        "hook": "opake_kernel_patches",
        "record": "RMSNorm(LlamaRMSNorm)",
        "flag": "rms_norm",
        "source": "fam.py:6",
        "path": path,
    }
    assert shown["records"][1]["source"] == "ext_llama.py:6"


def test_show_of_an_unknown_name_is_a_usage_error_with_a_hint(capsys) -> None:
    with isolated_registry(llama()):
        code, out, err = run(capsys, "families", "show", "lama")
    assert (code, out) == (2, "")
    assert err == "error: no family for model_type 'lama'; did you mean llama?\n"


def test_show_of_a_broken_family_fails(capsys) -> None:
    with isolated_registry(llama("import does_not_exist\n")):
        code, _, err = run(capsys, "families", "show", "llama")
    assert code == 1
    assert "does not import: ModuleNotFoundError: No module named 'does_not_exist'" in err


def test_show_says_which_transformers_a_family_needs(capsys) -> None:
    young = Distribution("fam", families={"new9": "fam"}, modules={"fam": "SINCE = {'new9': '5.99'}\n" + GOOD})
    with isolated_registry(young):
        code, _, err = run(capsys, "families", "show", "new9")
    assert code == 1
    assert "has no modeling module for 'new9'; it needs transformers >= 5.99" in err


def test_check_passes_on_our_llama(capsys) -> None:
    with isolated_registry(llama="opake_families.llama"):
        code, out, err = run(capsys, "families", "check", "llama")
    assert (code, err) == (0, "")
    head, row = (line.split() for line in out.splitlines())
    assert head == [
        "model_type",
        "family",
        "model",
        "attention",
        "right",
        "left",
        "unpadded",
        "kernels",
        "restored",
        "result",
    ]
    assert row[:4] == ["llama", "isolated", "LlamaForCausalLM", "sdpa"]
    assert all(float(cell) < 5e-6 for cell in row[4:8])
    assert row[8:] == ["yes", "ok"]


def test_check_needs_no_test_runner() -> None:
    code = "import sys; from opake.checking import family; print('pytest' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_check_reports_a_class_that_does_not_exist(capsys) -> None:
    with isolated_registry(llama(WRONG)):
        code, out, err = run(capsys, "families", "check", "--all")
    assert code == 1
    assert "FAIL" in out
    assert "error: llama: RMSNorm(LlamaRMSNrom) (fam.py:6): modeling_llama" in err
    assert "has no LlamaRMSNrom" in err


def test_check_finds_a_wrong_gradient(capsys) -> None:
    source = """
from opake.records import Replace, hookimpl

def wrong(q, k, cos, sin, unsqueeze_dim=1):
    return q * 1.001, k

@hookimpl
def opake_compat_patches(hf):
    yield Replace(hf.LlamaAttention, "apply_rotary_pos_emb", wrong)
"""
    with isolated_registry(llama(source)):
        code, _, err = run(capsys, "families", "check", "llama")
    assert code == 1
    assert re.search(r"error: llama: right: relative error \d\.\de[+-]\d+ is above 5e-06", err)


def test_check_finds_an_incomplete_restore(capsys) -> None:
    source = """
from dataclasses import dataclass
from typing import ClassVar
from opake.records import Record, Undo, hookimpl

@dataclass(frozen=True, slots=True)
class Leaves(Record):
    flag: ClassVar[str] = "batchify"
    def sites(self, model):
        yield "", model
    def apply(self, module):
        module.left_over = True
        return Undo([])

@hookimpl
def opake_compat_patches():
    yield Leaves()
"""
    with isolated_registry(llama(source)):
        code, out, err = run(capsys, "families", "check", "llama")
    assert code == 1
    assert out.split()[-2:] == ["FAIL", "FAIL"]
    assert "error: llama: restore left .left_over" in err


def test_a_family_that_breaks_does_not_stop_the_check_of_another(capsys) -> None:
    bad = Distribution("bad", families={"gpt2": "bad"}, modules={"bad": "import does_not_exist\n"})
    with isolated_registry(bad, llama()):
        code, out, err = run(capsys, "families", "check", "--all")
    assert code == 1
    assert [line.split()[-1] for line in out.splitlines()[1:]] == ["FAIL", "ok"]
    assert "error: gpt2: FamilyImportError: " in err


def test_check_of_a_model_without_a_family(capsys) -> None:
    with isolated_registry(llama()):
        code, _, err = run(capsys, "families", "check", "olmo")
        assert code == 2
        assert err == "error: no family for model_type 'olmo' (--generic checks it without a family)\n"
        code, out, err = run(capsys, "families", "check", "--generic", "olmo")
    assert (code, err) == (0, "")
    assert out.splitlines()[1].split()[:3] == ["olmo", "generic", "OlmoForCausalLM"]


def test_check_without_names_is_a_usage_error(capsys) -> None:
    code, _, err = run(capsys, "families", "check")
    assert code == 2
    assert "name a MODEL_TYPE, or pass --all" in err


def test_check_all_skips_what_transformers_does_not_have_yet(capsys) -> None:
    young = Distribution("fam", families={"new9": "fam"}, modules={"fam": "SINCE = {'new9': '5.99'}\n" + GOOD})
    with isolated_registry(young):
        code, out, _ = run(capsys, "families", "check", "--all")
    assert code == 0
    assert "new9: skipped, needs transformers >= 5.99" in out


@pytest.mark.parametrize("arguments", [["bogus"], ["families", "bogus"], ["families", "list", "--bogus"], []])
def test_wrong_use_exits_with_two(capsys, arguments: list[str]) -> None:
    assert run(capsys, *arguments)[0] == 2


def verbs() -> list[list[str]]:
    root = typer.main.get_command(cli.app)
    found = []
    for name, command in root.commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        found += [[name, verb] for verb in inner] if inner else [[name]]
    return found


def test_the_module_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "opake.cli", "families", "list", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [row["name"] for row in json.loads(done.stdout)] == [claim.name for claim in registry.listed()]


@pytest.mark.parametrize("verb", verbs(), ids=" ".join)
def test_every_verb_has_help_with_examples(capsys, verb: list[str]) -> None:
    code, out, _ = run(capsys, *verb, "--help")
    assert code == 0
    assert "Examples:" in out
    assert f"opake {' '.join(verb)}" in out.partition("Examples:")[2]


def test_version(capsys) -> None:
    from opake import __version__

    assert run(capsys, "--version") == (0, f"opake {__version__}\n", "")


def test_doctor_is_well_here(capsys) -> None:
    code, out, _ = run(capsys, "doctor", "--json")
    findings = {finding["what"]: finding for finding in json.loads(out)}
    assert code == 0
    assert {"python", "opake", "torch", "transformers", "peft", "CUDA", "kernels", "families"} <= set(findings)
    assert set(findings["torch"]) == {"what", "found", "state", "cost"}
    assert all(finding["cost"] for finding in findings.values() if finding["state"] != "ok")


def test_doctor_fails_on_a_conflict_and_names_idle_extensions(capsys, monkeypatch) -> None:
    monkeypatch.setenv(registry.BLOCK, "gone")
    blocked = Distribution("blocked", families={"gone": "fam"})
    idle = Distribution("idle", extensions={"nobody": "fam"})
    with isolated_registry(llama(), llama(name="fam-b"), blocked, idle):
        code, out, _ = run(capsys, "doctor", "--json")
    findings = [(f["what"], f["state"], f["cost"]) for f in json.loads(out)]
    assert code == 1
    assert findings.count(("family llama", "missing", "models of this type cannot be patched")) == 2
    assert ("family gone", "note", "OPAKE_BLOCK_FAMILIES=gone") in findings
    assert ("extension of nobody", "note", "no family 'nobody' to extend: it is never asked") in findings


def test_doctor_names_a_requirement_that_is_missing_or_out_of_range(monkeypatch) -> None:
    lines = ["pluggy>=999", "no-such-thing-at-all>=1", "windows-only; sys_platform == 'win32'"]
    monkeypatch.setattr(doctor_verb.metadata, "requires", lambda name: lines)
    found = {f.what: (f.state, f.cost) for f in doctor_verb._requirements()}
    assert found == {
        "pluggy": ("missing", "outside the supported range >=999"),
        "no-such-thing-at-all": ("missing", "required: no-such-thing-at-all>=1"),
    }


def test_tables_are_framed_on_a_terminal_only(capsys, monkeypatch) -> None:
    output.table("title", ("a", "b"), [("1", "ok")])
    assert capsys.readouterr().out == "a  b\n1  ok\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    output.table("title", ("a", "b"), [("1", "ok")])
    assert "title" in capsys.readouterr().out


def test_progress_is_silent_away_from_a_terminal(capsys) -> None:
    with output.progress("working", 2) as step:
        step("one")
        step("two")
    assert capsys.readouterr() == ("", "")
