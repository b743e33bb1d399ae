"""Cases about privacy: a row's gradient does not depend on its neighbours, in numbers and in the operators that run."""

# ruff: noqa: TID253
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from opake.testing.cells import Cell
from opake.testing.oracle import batch_gradients, model_loop_gradients
from opake.testing.trace import first_difference, operator_trace
from opake.testing.vmapped import vmap_gradients

from .base import LIMITS, Suite, assert_bitwise, assert_same_gradients

if TYPE_CHECKING:
    from opake.testing.workbench import Bench, Rows

ROW = 1


def neighbours(rows: Rows) -> Iterator[tuple[str, Rows]]:
    """The same row among other rows: other tokens, labels, padding."""
    others = torch.arange(len(rows["labels"])) != ROW
    tokens = _copied(rows)
    tokens["input_ids"][others] = rows["input_ids"][others].flip(1)
    yield "tokens", tokens
    labels = _copied(rows)
    labels["labels"][others] = -100
    yield "labels", labels
    for name, real in (("all valid", 1), ("nearly all padding", 0)):
        padding = _copied(rows)
        padding["attention_mask"][others] = real
        padding["attention_mask"][others, 4:6] = 1
        yield name, padding


def _copied(rows: Rows) -> Rows:
    return {name: value.clone() for name, value in rows.items()}


class RowCases(Suite):
    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    @pytest.mark.parametrize("padding", ["right", "left", "ones"])
    def test_row_is_independent(self, bench: Bench, attention: str, dtype: str, padding: str) -> None:
        model = bench.patched(attention, dtype).train()
        rows = bench.batch(padding)
        want = vmap_gradients(model, rows)
        for _, others in neighbours(rows):
            assert_bitwise(vmap_gradients(model, others), want, ROW)

    def test_operators_do_not_depend_on_contents(self, bench: Bench, attention: str) -> None:
        model = bench.patched(attention).train()
        rows = bench.batch("ones")
        want = operator_trace(lambda: vmap_gradients(model, rows))
        for name, others in neighbours(rows):
            got = operator_trace(lambda others=others: vmap_gradients(model, others))
            assert first_difference(want, got) is None, name

    def test_plain_operators_do_not_depend_on_padding(self, bench: Bench, attention: str) -> None:
        model = bench.patched(attention).train()
        batches = [bench.batch(padding) for padding in ("ones", "right", "left")]
        want, *others = (operator_trace(lambda rows=rows: batch_gradients(model, **rows)) for rows in batches)
        assert [first_difference(want, other) for other in others] == [None, None]

    @pytest.mark.parametrize("padding", ["right", "left"])
    def test_padded_row_equals_the_row_alone(self, bench: Bench, attention: str, padding: str) -> None:
        """Against the stock model on the row without its padding: a mask that is ignored by both would be seen."""
        rows = bench.batch(padding)
        rows["position_ids"] = (rows["attention_mask"].cumsum(1) - 1).clamp(min=0)
        # nothing is predicted from a padding position
        first = rows["attention_mask"].argmax(1)
        rows["labels"][torch.arange(len(first)), first] = -100
        got = vmap_gradients(bench.patched(attention).train(), rows)
        for row, real in enumerate(rows["attention_mask"].bool()):
            alone = {name: value[row, real][None] for name, value in rows.items()}
            want = model_loop_gradients(bench.stock(attention).train(), **alone)
            assert_same_gradients({name: tensor[row : row + 1] for name, tensor in got.items()}, want, LIMITS["fp32"])

    def test_chunks_of_a_batch(self, bench: Bench, attention: str) -> None:
        cell = Cell(attention, "right", "T", "fp32", "keep", "train")
        model, rows = bench.patched(attention).train(), bench.batch(cell.padding)
        want = bench.reference(attention, cell.dtype, cell.padding)
        for size in (1, 2):
            pieces = [{name: value[i : i + size] for name, value in rows.items()} for i in range(0, 3, size)]
            parts = [vmap_gradients(model, piece) for piece in pieces]
            got = {name: torch.cat([part[name] for part in parts]) for name in want}
            assert_same_gradients(got, want, LIMITS["fp32"])
