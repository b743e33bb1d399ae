"""`opake bench kernels`: providers compute the same, every mode runs, bars are drawn, unknown names are errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from opake import cli
from opake.bench import kernels as bench
from opake.bench.cases import CASES
from opake.bench.measure import Replay, captured, group, per_example, plain
from opake.bench.plot import draw

CARD = {"gpu": "a card", "torch": "2", "triton": "3", "copy_gbs": 4000.0}
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["bench", "kernels", "swiglu"])
    assert done.value.code == 1
    assert "needs a CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("arguments", [["no_such_op"], ["swiglu", "--vs", "no_such_rival"]])
def test_unknown_names_are_an_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["bench", "kernels", *arguments])
    assert done.value.code == 2
    assert "no_such" in capsys.readouterr().err


def test_bars_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    rows = [bench.Row("swiglu", "4 x 4", name, "plain", 0.5, 3900.0, 1.0) for name in bench.PROVIDERS]
    draw([*rows, bench.Row("swiglu", "4 x 4", "ours", "python plain", 0.1)], CARD, tmp_path / "bars.png")
    assert (tmp_path / "bars.png").stat().st_size > 1000


def _tuple(value: object) -> tuple:
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("name", list(CASES))
def test_a_case_times_the_same_thing_for_everybody(name: str) -> None:
    case = CASES[name]()
    args = case.arguments(True)
    ours, torchs = (plain(op, args, case.diff)() for op in (case.ours, case.torch))
    for a, b in zip(_tuple(case.ours(*args)), _tuple(case.torch(*args)), strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-2)
    assert [g.shape for g in ours] == [g.shape for g in torchs]
    if case.maps:
        per_row = captured(per_example(case.ours, case, args))
        per_row()
        assert isinstance(per_row, Replay)
        assert per_row.peak_gib > 0
    if case.grouped is not None:
        wanted = (case.grouped,) if isinstance(case.grouped, int) else case.grouped
        grads = dict(zip(case.diff, group(case.ours, case, args)(), strict=True))
        for i in set(wanted) & set(case.diff):
            assert grads[i].shape == (args[0].shape[0], *args[i].shape)
