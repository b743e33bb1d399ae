"""`opake families new`: what it declares is what people declared, it is right at once, and it says what it left out."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from opake import planning, registry
from opake.checking import answers
from opake.cli import main
from opake.errors import InputError
from opake.scaffold import new_family, render, survey
from opake.testing.isolated import Distribution, isolated_registry

SHIPPED = ("llama", "gemma2", "olmo2", "cohere", "phi3", "glm4", "gpt2")
# of one core; by now it is five
SECONDS = 60
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
    before = time.process_time()
    made = new_family(model_type, tmp_path / "plugin")
    assert time.process_time() - before < SECONDS
    assert made.outcome.failures == []
    assert made.outcome.family == "scaffold"
    assert {"Rotary", "LinearCrossEntropy", "FuseQKV"} <= {line.record for line in made.declaration.lines}
    assert len(made.declaration.left_out) <= 2


def test_what_was_not_proven_stands_in_the_module(tmp_path: Path) -> None:
    made = new_family("nanochat", tmp_path / "plugin")
    text = (made.directory / "opake_nanochat.py").read_text()
    assert "- Rotary: apply_rotary_pos_emb rotates in a layout that the op does not know" in text
    assert "Rotary(hf)" not in text


# what a model looks like that is no ordinary decoder: a part of the plugin is written, or a reason given
ODD = {
    # a router that is a subclass of Linear and returns two tensors
    "phimoe": ("Experts", "RMSNorm: the model uses torch.nn.LayerNorm"),
    # an encoder as a decoder
    "bert": ("CrossEntropy", "FuseQKV(hf.BertSelfAttention)"),
    # a text model inside a larger config, with a model type of its own
    "emu3": ("Rotary", ""),
    # a config of its own over the classes of Llama
    "exaone": ("GatedMLP", ""),
    # rounding in its layers is larger than the tolerance
    "gemma4_text": ("AddRMSNorm", "Rotary: apply_rotary_pos_emb rotates in a layout that the op does not know"),
}


@pytest.mark.parametrize("model_type", ODD)
def test_an_odd_model_gets_what_can_be_proven(model_type: str, tmp_path: Path) -> None:
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip(f"the installed Transformers has no {model_type}")
    record, left_out = ODD[model_type]
    made = new_family(model_type, tmp_path / "plugin")
    assert made.outcome.failures == []
    assert record in {line.record for line in made.declaration.lines}
    assert any(reason.startswith(left_out) for reason in ["", *made.declaration.left_out])
    entries = tomllib.loads((made.directory / "pyproject.toml").read_text())["project"]["entry-points"][
        registry.FAMILIES
    ]
    assert set(entries) == {model_type, made.declaration.asked}


def test_a_model_that_no_transform_can_run_is_written_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = answers.for_version(transformers.__version__).types["dbrx"].reason
    if "unpatched" in reason:
        pytest.skip(f"the tiny model of stock DBRX does not run on Transformers {transformers.__version__}: {reason}")
    with pytest.raises(SystemExit) as done:
        main(["families", "new", "dbrx", str(tmp_path / "dbrx")])
    assert done.value.code == 1
    assert "error: dbrx: RuntimeError: vmap: " in capsys.readouterr().err
    assert "- opake_compat_patches: without any of these records the model does not" in (
        tmp_path / "dbrx" / "opake_dbrx.py"
    ).read_text().replace("\n  ", " ")


def test_a_look_that_fails_costs_what_it_would_have_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise IndexError("nothing there")

    monkeypatch.setattr(survey.rms_norm, "variant_of", broken)
    made = new_family("arcee", tmp_path / "plugin")
    assert "norms: looking at it raised IndexError: nothing there" in made.declaration.left_out
    assert {"Rotary", "FuseQKV"} <= {line.record for line in made.declaration.lines}


def test_nothing_to_declare_is_a_plugin_all_the_same(tmp_path: Path) -> None:
    made = new_family("mpt", tmp_path / "plugin")
    made.declaration.lines.clear()
    modules = {"opake_mpt": render.module(made.declaration)}
    with isolated_registry(Distribution("new", families={"mpt": "opake_mpt"}, modules=modules)):
        assert planning.plan("mpt")[1] == []


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
        (("arcee", "full/file/new"), r"new cannot be made: .*file is no directory that may be written to"),
        (("arcee", "new", "-"), "'-' is no name for a distribution"),
        (("arcee", "new", "Opake"), "a distribution named 'Opake' would take the place of opake itself"),
        (("gpt-sw3", "new"), "a config of 'gpt-sw3' says model_type 'gpt2', .* opake families new gpt2 DIRECTORY"),
        (("git", "new"), "a tiny model of 'git' does not run by itself, so nothing can be compared: ValueError"),
        (("gemma4_assistant", "new"), "Gemma4AssistantConfig.* (refuses the tiny sizes|has no attribute 'vocab_size')"),
    ],
)
def test_refusals_write_nothing(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    model_type, directory, *name = arguments
    if "did you mean" not in message and model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip(f"the installed Transformers has no {model_type}")
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
