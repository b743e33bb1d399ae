"""`opake families new`: what it declares is what people declared, it is right at once, and it says what it left out."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from opake import planning, registry
from opake.cli import main
from opake.errors import InputError
from opake.scaffold import new_family
from opake.testing.isolated import Distribution, isolated_registry

SHIPPED = ("llama", "gemma2", "olmo2", "cohere", "phi3", "glm4", "gpt2")
OTHERS = ("seed_oss", "hunyuan_v1_dense", "arcee", "starcoder2")


@pytest.mark.parametrize("model_type", SHIPPED)
def test_a_family_that_ships_is_declared_as_by_hand(model_type: str, tmp_path: Path) -> None:
    by_hand = {(row.hook, str(row.record)) for row in planning.plan(model_type)[1]}
    made = new_family(model_type, tmp_path / "plugin")
    assert made.outcome.failures == []
    modules = {made.declaration.module: (made.directory / f"{made.declaration.module}.py").read_text()}
    with isolated_registry(Distribution("new", families={model_type: made.declaration.module}, modules=modules)):
        assert {(row.hook, str(row.record)) for row in planning.plan(model_type)[1]} == by_hand


@pytest.mark.parametrize("model_type", OTHERS)
def test_a_family_that_does_not_ship_is_right_at_once(model_type: str, tmp_path: Path) -> None:
    assert model_type not in {claim.name for claim in registry.listed()}
    made = new_family(model_type, tmp_path / "plugin")
    assert made.outcome.failures == []
    assert made.outcome.family == "scaffold"
    assert {"Rotary", "LinearCrossEntropy", "FuseQKV"} <= {line.record for line in made.declaration.lines}
    assert len(made.declaration.left_out) <= 2


def test_what_was_not_proven_stands_in_the_module(tmp_path: Path) -> None:
    made = new_family("nanochat", tmp_path / "plugin")
    text = (made.directory / "opake_nanochat.py").read_text()
    assert "- Rotary: apply_rotary_pos_emb rotates in a layout that the op does not know" in text
    assert "Rotary(hf)" not in text


def test_it_is_a_distribution_that_passes_the_suite(
    tmp_path: Path, here: Any, clean: Any, build: Any, run_its_tests: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin = tmp_path / "mine"
    with pytest.raises(SystemExit) as done:
        main(["families", "new", "seed_oss", str(plugin), "--name", "my-seed.oss"])
    assert done.value.code == 0
    out = capsys.readouterr().out
    assert "8 records declared, 0 left out" in out
    here.run("-m", "pip", "--python", str(clean.python), "install", "-q", "--no-deps", "--no-index", str(build(plugin)))
    assert clean.families()["seed_oss"] == ("ok", "my-seed.oss")
    # the whole suite runs for families that ship; here it is enough that the files work together
    run_its_tests("-k", "claimed or without_torch or validate or site or record or restore")


@pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="ruff is not installed")
def test_its_files_are_formatted(tmp_path: Path) -> None:
    for model_type in ("gemma2", "gpt2"):
        new_family(model_type, tmp_path / model_type)
    for verb in (["format", "--check"], ["check", "--select", "E,F,I,W,RUF"]):
        command = [sys.executable, "-m", "ruff", *verb, "--no-cache", "--line-length", "120", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("arce", "new"), "no causal language model of model_type 'arce'; did you mean arcee?"),
        (("arcee", "full"), "full is not an empty directory; name one that does not exist yet"),
        (("arcee", "new", "-"), "'-' is no name for a distribution"),
    ],
)
def test_refusals_write_nothing(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    model_type, directory, *name = arguments
    with pytest.raises(InputError, match=message.replace("?", r"\?")):
        new_family(model_type, tmp_path / directory, *name)
    assert not (tmp_path / "new").exists()


def test_it_needs_no_test_runner(tmp_path: Path) -> None:
    code = "import sys; sys.modules['pytest'] = None; from opake import cli; cli.main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "families", "new", "seed_oss", str(tmp_path / "new")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1000:]


def test_a_second_claim_is_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["families", "new", "gpt2", str(tmp_path / "gpt2")])
    assert "serves gpt2 already: with both installed, set OPAKE_BLOCK_FAMILIES=opake:gpt2" in capsys.readouterr().out
