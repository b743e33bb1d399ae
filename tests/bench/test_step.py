"""`opake bench step`: every way makes the same gradient, missing rivals say so, the command prints and draws."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from opake import cli
from opake.bench import step as bench
from opake.bench import step_ways
from opake.bench.step_models import SHAPES, build, config, sizes_of

# no warning of PEFT's about a property that Transformers has renamed
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
ROWS, TOKENS = 2, 8
OURS = ["ours", "eager", "vmap", "vmap-eager", "remat-mlp", "remat", "ordinary", "hf-vmap"]


@pytest.fixture
def sizes():
    return sizes_of("qwen2", {}, ROWS, TOKENS, 2)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(bench, "_timed", lambda step, device: (1.0, 1.0, 0.5))


def test_every_way_makes_the_same_gradient(sizes, quick):
    seen = []
    rows = list(bench.run(sizes, [*OURS, "loop", "hf"], "cpu", seen.append))
    assert [row.way for row in rows] == seen
    assert all(row.difference < 5e-6 for row in rows if row.way in OURS), rows
    assert [row.difference for row in rows if row.way in ("loop", "hf")] == [None, None]
    assert {row.way for row in rows if not row.private} == {"ordinary", "hf"}


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize("kind", ["qwen2", "gemma3_text", "qwen3_next", "llama"])
def test_a_tiny_model_can_be_deeper(kind, layers):
    made = sizes_of(kind, {"num_hidden_layers": layers}, ROWS, TOKENS, 2).config
    assert made.num_hidden_layers == layers
    kinds, known = getattr(made, "layer_types", None), getattr(sizes_of(kind, {}, 1, 8, 2).config, "layer_types", None)
    assert kinds == (None if known is None else [known[i % len(known)] for i in range(layers)])


@pytest.mark.parametrize("layers", [2, 5])
def test_a_saved_config_can_be_deeper(tmp_path, layers):
    sizes_of("gemma3_text", {"num_hidden_layers": 3}, 1, 8, 2).config.save_pretrained(tmp_path)
    made = sizes_of(str(tmp_path), {"num_hidden_layers": layers}, 1, 8, 2)
    three = ["sliding_attention", "full_attention", "sliding_attention"]
    assert made.config.layer_types == (three * 2)[:layers]
    build(made, "cpu")


def test_a_wrong_gradient_is_seen(sizes, quick, monkeypatch):
    right = step_ways.WAYS["ours"]

    def wrong(model, rows):
        step = right.make(model, rows)
        return lambda: ({name: 1.01 * g for name, g in step()[0].items()}, "")

    monkeypatch.setitem(step_ways.WAYS, "ours", replace(right, make=wrong))
    (row,) = bench.run(sizes, ["ours"], "cpu")
    assert row.difference == pytest.approx(0.01, rel=1e-3)


def test_a_way_that_fails_says_why(sizes, quick, monkeypatch):
    def missing(model, rows):
        raise ImportError("no such package")

    monkeypatch.setitem(step_ways.WAYS, "liger", replace(step_ways.WAYS["liger"], make=missing))
    (row,) = bench.run(sizes, ["liger"], "cpu")
    assert (row.ms, row.note) == (None, "ImportError: no such package")


def test_adapters_have_gradients_and_weights_are_repeatable(sizes):
    one, two = build(sizes, "cpu"), build(sizes, "cpu")
    factors = {name: p for name, p in one.named_parameters() if "lora_B" in name}
    assert factors
    assert all(p.abs().sum() > 0 for p in factors.values())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_those_of_the_public_models(name):
    made = config(name, {}, 1024)
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(made)
    wanted = {"qwen2-0.5b": 494, "llama-3.2-1b": 1236, "qwen3-0.6b": 596, "gemma3-1b": 1000, "smollm2-135m": 135}
    assert round(model.num_parameters() / 1e6) == pytest.approx(wanted[name], abs=1)


def test_the_command_prints_a_table_json_and_bars(quick, capsys, tmp_path: Path):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    cli.main(["bench", "step", "qwen2", "--batch", "2", "--seq", "8", "--plot", str(tmp_path / "step.png")])
    lines = capsys.readouterr().out.splitlines()
    assert "qwen2, 2 x 8" in lines[0]
    assert lines[1].split()[:2] == ["way", "private"]
    assert (tmp_path / "step.png").stat().st_size > 1000
    cli.main(["bench", "step", "qwen2", "--batch", "2", "--seq", "8", "--vs", "", "--json"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["way"] for row in rows] == ["ours", "eager", "vmap", "remat-mlp", "remat", "ordinary"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--vs", "no_such_rival"],
        ["--size", "hidden_size"],
        ["--size", "hiden_size=64"],
        ["smollm2-135m", "--size", "hiden_size=64"],
        ["no_such_model"],
        ["t5"],
        ["."],
    ],
)
def test_unknown_names_are_an_error(arguments, capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["bench", "step", *arguments])
    assert done.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_times_and_memory_of_a_cpu(sizes):
    (row,) = bench.run(sizes, ["eager"], "cpu")
    assert 0 < row.ms < 1e4
    assert 0 < row.peak_gib < 1


@pytest.mark.parametrize("option", ["--batch", "--seq", "--rank"])
def test_sizes_out_of_range_are_an_error(option, capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["bench", "step", "qwen2", option, "-1" if option == "--rank" else "0"])
    assert done.value.code == 2
    assert option in capsys.readouterr().err


def test_sizes_that_torch_cannot_make_are_one_line(capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["bench", "step", "qwen2", "--size", "hidden_size=-4"])
    assert done.value.code == 1
    err = capsys.readouterr().err
    assert "error: qwen2 cannot be measured at these sizes: " in err
    assert "Traceback" not in err


def test_a_plot_needs_its_folder_before_anything_is_measured(capsys, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    for command in (["step", "qwen2"], ["memory", "qwen2", "--lengths", "8"]):
        with pytest.raises(SystemExit) as done:
            cli.main(["bench", *command, "--plot", str(tmp_path / "none" / "step.png")])
        assert done.value.code == 2
        assert "there is no folder" in capsys.readouterr().err
