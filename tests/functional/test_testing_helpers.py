"""The measuring instruments themselves: what they count, and that they can say no."""

import math

import torch

from opake.testing.live import LiveBytes, peak_live_bytes
from opake.testing.oracle import relative_error
from opake.testing.trace import first_difference, operator_trace

KB = 1024


def test_live_bytes_counts_what_is_made_and_still_held():
    old = torch.zeros(64, 4)
    with LiveBytes() as live:
        old.t().clone()
        assert live.now() == 0
        kept = old + 1
        view = kept.view(-1)[1:]
        del kept
        assert live.now() == KB
        del view
        assert live.now() == 0
    assert live.peak == KB
    assert live.operators >= 5


def test_views_of_older_tensors_are_nothing_new():
    old = torch.zeros(64, 4)
    with LiveBytes() as live:
        held = [old.t(), old.view(-1), old.expand(3, 64, 4)]
        old.add_(1)
    assert len(held) == 3
    assert live.peak == 0


def test_peak_is_the_highest_moment():
    def fn():
        a = torch.zeros(256)
        b = a + a
        del a
        return b + b

    assert peak_live_bytes(fn) == 2 * KB


def test_relative_error_tells_wrong_from_right():
    want = {"a": torch.tensor([1.0, 2.0]), "noise": torch.tensor([1e-9])}
    assert relative_error(want, want) == 0
    assert math.isclose(relative_error({**want, "a": torch.tensor([1.0, 2.2])}, want), 0.1, rel_tol=1e-6)
    assert relative_error({**want, "noise": torch.tensor([2e-9])}, want) < 1e-4
    for wrong in ({"a": want["a"]}, {**want, "a": torch.tensor([1.0, math.nan])}, {**want, "a": torch.zeros(3)}):
        assert relative_error(wrong, want) == math.inf
    assert relative_error({"a": torch.zeros(2)}, {"a": torch.zeros(2)}) == math.inf


def test_traces_part_where_contents_choose_a_path():
    def fn(x):
        return x.sin() if x.sum() > 0 else x.cos()

    up, down = (operator_trace(lambda s=s: fn(torch.full((3,), s))) for s in (1.0, -1.0))
    assert first_difference(up, up) is None
    assert "sin" in str(first_difference(up, down))
    assert first_difference(up, up[:-1]) == f"{len(up)} operators against {len(up) - 1}"
