"""`opake bench memory`: what it counts, what it predicts, and the command itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from opake import cli
from opake.bench import memory
from opake.bench.memory import Kept
from opake.bench.memory_model import Sizes, build, config_of
from opake.bench.memory_trace import MemoryTrace, part_of

# no warning of PEFT's about a property that Transformers has renamed
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")


@pytest.fixture
def sizes() -> Sizes:
    return Sizes(config_of("llama", {}), rows=4, tokens=32, rank=4)


def test_parts_are_named_by_their_place_in_the_layer() -> None:
    assert part_of("base_model.model.model.layers.3.self_attn.q_proj.lora_A.default") == "self_attn"
    assert part_of("model.layers.0") == "layer"
    assert part_of("model.embed_tokens") == "embed_tokens"
    assert part_of("") == "step"


def test_a_trace_counts_what_the_backward_starts_with() -> None:
    class Squares(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin().cos()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Squares()])
            self.head = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layers[0](x) * 2)

    model, x = Model(), torch.randn(256, requires_grad=True)
    with MemoryTrace(model) as trace:
        model(x).sum().backward()
    # the sine for the cosine's gradient; its cosine is an input of what was summed and gone by then
    assert trace.kept["layer"] == 1024
    assert trace.peak >= sum(trace.kept.values())
    assert sum(trace.at_peak.values()) == trace.peak


def test_what_is_kept_lies_above_the_floor_and_remat_below(sizes: Sizes) -> None:
    folded, remat = (memory.kept(sizes, way, "cpu") for way in ("folded", "remat"))
    for each in folded:
        if each.floor is not None and each.part != "gradients":
            assert each.kept >= each.floor, each
    by_part = {each.part: each for each in folded}
    assert {"self_attn", "mlp", "layer"} <= set(by_part)
    assert sum(each.kept for each in remat) < 0.5 * sum(each.kept for each in folded)


# of a family without a plugin, of torch's on the CPU under vmap, and of PEFT's about GPT-2's layers
loud = pytest.mark.filterwarnings(
    "ignore:no family for model_type", "ignore:There is a performance drop", "ignore:fan_in_fan_out is set"
)


@loud
@pytest.mark.parametrize(("kind", "rank"), [("bert", 8), ("llama", 8), ("llama", 0), ("gpt2", 8)])
def test_no_peak_is_below_the_floor(kind: str, rank: int) -> None:
    sizes = Sizes(config_of(kind, {}), 2, 8, rank)
    for way in ("folded", "remat"):
        found = memory.kept(sizes, way, "cpu")
        assert 0 < memory.least(found) <= (memory.peak(sizes, way, 2, "cpu").peak or 0)
        if way == "folded":
            measured = {each.part for each in found if each.kept}
            assert {each.part for each in found if each.floor} <= measured | {"activations", "gradients"}


def test_the_floor_of_a_step_is_the_larger_of_what_comes_and_goes() -> None:
    parts = [Kept("mlp", 0, 0, 3), Kept("layer", 0, 0, 2), Kept("norm", 9, 9, None)]
    assert memory.least([*parts, Kept("gradients", 0, 0, 4)]) == 5
    assert memory.least([*parts, Kept("gradients", 0, 0, 7)]) == 7


def test_ways_differ_and_the_line_predicts_the_largest_microbatch(sizes: Sizes) -> None:
    long = Sizes(sizes.config, 2, 128, 4)
    peaks = {each.way: each for each in memory.curve(long, [128], memory.WAYS, "cpu")}
    values = {way: each.peak or 0 for way, each in peaks.items()}
    assert values["eager"] > values["folded"] > values["remat"] > 0
    assert sizes.config._attn_implementation != "eager"
    two, four = (memory.peak(sizes, "folded", rows, "cpu") for rows in (2, 4))
    rows = memory.largest([two, four], 3.5 * (four.peak or 0))
    assert rows is not None
    assert (memory.peak(sizes, "folded", rows, "cpu").peak or 0) <= 3.5 * (four.peak or 0)
    assert (memory.peak(sizes, "folded", rows + 1, "cpu").peak or 0) > 3.5 * (four.peak or 0)
    assert memory.largest([two, four], 1000.0) is None


def test_every_parameter_can_be_trained() -> None:
    model = build(Sizes(config_of("qwen2", {"hidden_size": 16, "num_attention_heads": 2}), 1, 8, 0), "folded", "cpu")
    assert all(p.requires_grad for p in model.parameters())
    assert model.config.hidden_size == 16


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str, str]:
    with pytest.raises(SystemExit) as done:
        cli.main(["bench", "memory", *arguments])
    captured = capsys.readouterr()
    return done.value.code, captured.out, captured.err


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    given = (
        "llama",
        "--rows",
        "2",
        "--tokens",
        "16",
        "--rank",
        "2",
        "--size",
        "num_hidden_layers=1",
        "--budget",
        "0.01",
    )
    code, out, _ = run(capsys, *given)
    assert code == 0
    assert "self_attn" in out
    assert "rows fit 0.01 GiB" in out
    code, out, _ = run(capsys, *given, "--json", "--lengths", "8")
    found = json.loads(out)
    assert code == 0
    assert [each["way"] for each in found["curve"]] == list(memory.WAYS)
    assert found["largest"]["remat"] >= found["largest"]["folded"] > 0


@loud
@pytest.mark.parametrize("kind", ["gpt2", "roberta"])
def test_learned_positions_are_as_many_as_the_rows_need(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, kind, "--rows", "1", "--tokens", "65", "--lengths", "72", "--json")
    assert code == 0
    assert {each["tokens"] for each in json.loads(out)["curve"]} == {72}


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "lama")
    assert code == 2
    assert "no model_type 'lama'" in err
    code, _, err = run(capsys, "llama", "--size", "hidden_size")
    assert code == 2
    assert "name=value" in err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--rows", "0"), "--rows"),
        (("--tokens", "-4"), "--tokens"),
        (("--rank", "-1"), "--rank"),
        (("--budget", "0"), "above zero"),
        (("--budget", "nan"), "above zero"),
        (("--lengths", "8,x"), "'x' is none"),
        (("--lengths", "0"), "'0' is none"),
        (("--size", "hiden_size=4"), "'hiden_size'; the nearest is 'hidden_size'"),
    ],
)
def test_values_out_of_range(given: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "llama", *given)
    assert code == 2
    assert said in err


def test_settings_under_other_names_are_known() -> None:
    assert config_of("gpt2", {"hidden_size": 16, "n_head": 2}).n_embd == 16
    assert config_of("llama", {"rope_theta": 500.0}).rope_parameters["rope_theta"] == 500.0


def test_directories_without_a_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, str(tmp_path))
    assert code == 2
    assert "has no config.json" in err
