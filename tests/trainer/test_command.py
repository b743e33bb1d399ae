"""`opake train` from end to end on a tiny model, and what it says to wrong data."""

from __future__ import annotations

import io
import json
import math
import warnings
from pathlib import Path

import pytest
from peft import PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerState

from opake import cli
from opake.checking.tiny import tiny_model
from opake.demo import curves
from opake.errors import InputError, MissingDependency, OpakeWarning
from opake.finetune import data, live
from opake.plots import check_plot

WORDS = ["the", "patient", "has", "a", "cold", "and", "sleeps", "well"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with a tiny model `lm` and notes, one a line."""
    where = tmp_path_factory.mktemp("train")
    tiny_model("llama").save_pretrained(where / "lm")
    words = Tokenizer(models.WordLevel({word: i + 1 for i, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(where / "lm")
    notes = [" ".join(WORDS[(i + j) % len(WORDS)] for j in range(4 + i % 5)) for i in range(60)]
    (where / "notes.jsonl").write_text("".join(json.dumps({"text": note}) + "\n" for note in notes))
    return where


def run(capsys, *arguments) -> tuple[int, str, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OpakeWarning)
        with pytest.raises(SystemExit) as done:
            cli.main(["train", *map(str, arguments)])
    captured = capsys.readouterr()
    assert isinstance(done.value.code, int)
    return done.value.code, captured.out, captured.err


def test_a_run_shows_epsilon_and_saves_adapter_and_card(capsys, folder) -> None:
    out = folder / "adapter"
    plan = ("--model", folder / "lm", "--dataset", folder / "notes.jsonl", "--output", out, "--batch-size", 6)
    noise = ("--noise-multiplier", 0.8, "--length", 16, "--noise-seed", 1)
    code, shown, _ = run(capsys, *plan, *noise, "--steps", 10)
    assert code == 0
    lines = shown.splitlines()
    assert "54 rows of up to 16 tokens, 6 more held out" in lines[0]
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 11
    spent = [float(line.split("epsilon ")[1].split()[0]) for line in steps if "epsilon" in line]
    assert len(spent) == 10
    assert spent == sorted(spent)
    assert any(line.startswith("engine batched: every trainable parameter") for line in lines)
    assert f"for tests only, the seed is public: epsilon {spent[-1]:.3f} at delta" in lines[-4]
    assert lines[-1] == f"adapter and privacy card in {out}"
    (curve,) = [line for line in lines if line.startswith("held-out loss ")]
    assert curve.split()[2][0] != curve.split()[2][-1], "a curve, not a line"
    (curve,) = [line for line in lines if line.startswith("epsilon  ")]
    assert curve.split()[1][-1] in "█#"
    assert curve.endswith(f" to {spent[-1]:.3f}")
    card = json.loads((out / "privacy.json").read_text())
    assert card["epsilon"] == pytest.approx(spent[-1], abs=1e-3)
    assert (card["steps"], card["test_only"]) == (10, True)
    assert (out / "PRIVACY.md").is_file()
    PeftModel.from_pretrained(tiny_model("llama"), str(out))
    assert run(capsys, *plan, *noise, "--steps", 12, "--resume")[0] == 0
    assert json.loads((out / "privacy.json").read_text())["steps"] == 12


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "either target_epsilon or noise_multiplier"),
        (("--target-epsilon", 3, "--noise-multiplier", 1), "either target_epsilon or noise_multiplier"),
        (("--target-epsilon", 3, "--field", "note"), "notes.jsonl:1: no text in the field 'note', only text"),
        (("--target-epsilon", 3, "--batch-size", 500), "the data set has 54 rows"),
        (("--target-epsilon", 3, "--resume"), "never has no checkpoint to resume from; leave out --resume"),
        (("--target-epsilon", 3, "--output", __file__), "test_command.py is a file; name a folder"),
    ],
)
def test_wrong_use_is_one_line(capsys, folder, options, says) -> None:
    plan = ("--model", folder / "lm", "--dataset", folder / "notes.jsonl", "--output", folder / "never")
    code, _, err = run(capsys, *plan, *options)
    assert code == 2
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert says in line


def test_what_becomes_a_row(tmp_path, monkeypatch) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": "x" * (i + 1)}) + "\n\n" for i in range(20)))
    training, held_out = data.load(str(lines), "text", lambda text: list(text.encode()), 8)
    assert (len(training), len(held_out)) == (18, 2)
    assert max(len(row["input_ids"]) for row in training) == 8
    lines.write_text("not JSON\n")
    with pytest.raises(InputError, match=r"lines\.jsonl:1: no text in the field 'text'"):
        data.load(str(lines), "text", lambda text: [1], 8)
    lines.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"lines\.jsonl is not text in UTF-8"):
        data.load(str(lines), "text", lambda text: [1], 8)
    lines.write_text('{"text": "alone"}\n')
    with pytest.raises(InputError, match="has 1 rows with text; 10 are needed"):
        data.load(str(lines), "text", lambda text: [1], 8)
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(MissingDependency, match=r"someone/notes is no file.*pip install datasets"):
        data.load("someone/notes", "text", lambda text: [1], 8)


def test_a_sketch_of_the_curves(monkeypatch) -> None:
    history = [{"step": i, "epsilon": 0.5 * i, "eval_loss": 4 - i} for i in range(4)] + [
        {"step": 4, "train_runtime": 1}
    ]
    assert curves.points(history) == {
        "held-out loss": [(0, 4), (1, 3), (2, 2), (3, 1)],
        "epsilon": [(0, 0), (1, 0.5), (2, 1), (3, 1.5)],
    }
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), "utf-8"))
    assert curves.sketch(history) == ["held-out loss █▆▃▁  4.000 to 1.000", "epsilon       ▁▃▆█  0.000 to 1.500"]
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert curves.sketch(history) == ["held-out loss #+-_  4.000 to 1.000", "epsilon       _-+#  0.000 to 1.500"]
    assert curves.sketch([{"step": 1, "epsilon": math.inf}, {"step": 1, "eval_loss": 2.0}]) == [
        "held-out loss _  2.000 to 2.000"
    ]


def test_a_bar_on_a_terminal_shows_steps_epsilon_and_loss(monkeypatch) -> None:
    shown = io.StringIO()
    shown.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    bar, state = live.Live(), TrainerState(max_steps=8)
    bar.on_train_begin(None, state, None)
    state.global_step = 3
    bar.on_step_end(None, state, None)
    bar.on_log(None, state, None, logs={"epsilon": 1.5, "eval_loss": 2.25})
    bar._bar.refresh()
    bar.on_train_end(None, state, None)
    assert "epsilon 1.500  held-out loss 2.250" in shown.getvalue()
    assert "3/8" in shown.getvalue()


def test_curves_are_drawn_where_matplotlib_is(tmp_path) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib, which is not installed")
    history = [{"step": i, "epsilon": math.sqrt(i), "eval_loss": 4 - i / 10} for i in range(5)]
    live.draw(history, tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 1000


def test_a_plot_without_matplotlib_is_refused_before_training(tmp_path, capsys, folder, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    plan = ("--dataset", folder / "notes.jsonl", "--target-epsilon", 3, "--plot", tmp_path / "run.png")
    code, _, err = run(capsys, *plan)
    assert code == 1
    assert "--plot needs the package matplotlib" in err


def test_a_plot_needs_its_folder_before_training(tmp_path, capsys, folder, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    plan = ("--dataset", folder / "notes.jsonl", "--target-epsilon", 3, "--plot", tmp_path / "none" / "run.png")
    code, _, err = run(capsys, *plan)
    assert code == 2
    assert "there is no folder" in err
    # the folder of the adapter is made by the training
    check_plot(tmp_path / "adapter" / "run.png", made=tmp_path / "adapter")


def test_the_demo_tells_epsilon(folder, capsys) -> None:
    from opake.demo import run as demo

    text = folder / "text.txt"
    text.write_text("\n\n".join(" ".join(WORDS[(i * j) % 8] for j in range(1, 40)) for i in range(1, 90)))
    code = demo(model=str(folder / "lm"), text=text, steps=3)
    out = capsys.readouterr().out
    assert code == 0, out
    assert "step   3  epsilon" in out
    assert "if the seed were not public" in out
    assert "engine: batched" in out
    assert "\nepsilon       " in out
    assert "\nloss          " in out
    saved = Path(out.split("adapter and privacy card in ")[1].splitlines()[0])
    assert json.loads((saved / "privacy.json").read_text())["steps"] == 3
    PeftModel.from_pretrained(tiny_model("llama"), str(saved))
