"""Cases inside transforms: per-example gradients equal a loop of one-row backward passes on the stock model."""

# ruff: noqa: TID253
from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from opake.testing.cells import Cell
from opake.testing.oracle import model_loop_gradients
from opake.testing.switch import checkpointing
from opake.testing.trace import operator_trace
from opake.testing.vmapped import vmap_gradients

from .base import LIMITS, Suite, assert_same_gradients, mean_error

if TYPE_CHECKING:
    from opake.testing.workbench import Bench, Rows


def finite(gradients: Rows) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in gradients.values())


def assert_cell(bench: Bench, cell: Cell, got: Rows) -> None:
    """Compare with the loop: by the limit of the dtype, or, in bfloat16, by twice the error of the stock model."""
    if cell.dtype != "bf16":
        want = bench.reference(cell.attention, cell.dtype, cell.padding)
        if not finite(want):
            pytest.skip(f"the stock model gives gradients that are not finite in {cell.dtype}")
        rounding = functools.partial(bench.rounding, cell.attention) if cell.dtype == "fp32" else dict
        assert_same_gradients(got, want, LIMITS[cell.dtype], rounding)
        return
    exact = bench.reference(cell.attention, "rounded", cell.padding)
    stock = mean_error(bench.reference(cell.attention, "bf16", cell.padding), exact)
    ours = mean_error(got, exact)
    assert ours <= 2 * stock, f"error to float32 {ours:.2e}, more than twice that of the stock model, {stock:.2e}"


class GradientCases(Suite):
    def test_per_example_gradients(self, bench: Bench, cell: Cell) -> None:
        model = bench.patched(cell.attention, cell.dtype).train(cell.mode == "train")
        with checkpointing(model, cell.checkpointing == "ckpt"):
            got = vmap_gradients(model, bench.batch(cell.padding), shape=cell.shape)
        assert_cell(bench, cell, got)

    @pytest.mark.parametrize("padding", ["right", "none"])
    def test_inputs_embeds(self, bench: Bench, attention: str, padding: str) -> None:
        rows = bench.batch(padding)
        ids = rows.pop("input_ids")
        stock = bench.stock(attention).train()
        rows["inputs_embeds"] = stock.get_input_embeddings()(ids).detach()
        want = model_loop_gradients(stock, **rows)
        assert_same_gradients(vmap_gradients(bench.patched(attention).train(), rows), want, LIMITS["fp32"])

    @pytest.mark.parametrize("padding", ["left", "none"])
    @pytest.mark.parametrize("shape", ["T", "1xT"])
    def test_position_ids(self, bench: Bench, attention: str, padding: str, shape: str) -> None:
        rows = bench.batch(padding)
        B, T = rows["labels"].shape
        rows["position_ids"] = torch.arange(T).repeat(B, 1) + torch.arange(B)[:, None] * 3
        want = model_loop_gradients(bench.stock(attention).train(), **rows)
        got = vmap_gradients(bench.patched(attention).train(), rows, shape=shape)
        assert_same_gradients(got, want, LIMITS["fp32"])

    def test_a_row_without_labels(self, bench: Bench, attention: str) -> None:
        """Its loss and gradients are 0, where the stock model divides by zero, and its neighbours do not notice."""
        rows = bench.batch()
        rows["labels"] = rows["labels"].clone()
        rows["labels"][1] = -100
        got = vmap_gradients(bench.patched(attention).train(), rows)
        others = [0, *range(2, len(rows["labels"]))]
        assert all(not tensor[1].any() for tensor in got.values())
        want = bench.reference(attention, "fp32", "right")
        pick = {name: tensor[others] for name, tensor in want.items()}
        assert_same_gradients({name: tensor[others] for name, tensor in got.items()}, pick, LIMITS["fp32"])

    def test_shared_arguments(self, bench: Bench, attention: str) -> None:
        """A mask that all rows share is no batch dimension of its own."""
        rows = bench.batch("ones")
        want = vmap_gradients(bench.patched(attention).train(), rows)
        shared = {**rows, "attention_mask": rows["attention_mask"][0]}
        got = vmap_gradients(bench.patched(attention), shared, in_dims={"attention_mask": None})
        assert_same_gradients(got, want, LIMITS["fp32"])

    def test_outputs_lose_the_batch_dimension(self, bench: Bench, attention: str) -> None:
        model = bench.patched(attention).eval()
        rows = bench.batch()
        rows.pop("labels")
        ask = {"output_hidden_states": True}

        def outputs(row: Rows) -> tuple[Any, ...]:
            out = model(**row, **ask)
            return out.logits, tuple(out.hidden_states)

        logits, hidden = torch.func.vmap(outputs)(rows)
        want = bench.stock(attention).eval()(**rows, **ask)
        assert logits.shape == want.logits.shape
        assert [state.shape for state in hidden] == [state.shape for state in want.hidden_states]
        real = rows["attention_mask"].bool()
        torch.testing.assert_close(logits[real], want.logits[real], rtol=1e-4, atol=1e-4)

    def test_frozen_parameters_cost_nothing(self, bench: Bench, attention: str) -> None:
        model = bench.build(attention)
        bench.apply(model)
        frozen = self._freeze(model)
        rows = bench.batch()
        got: Rows = {}
        steps = operator_trace(lambda: got.update(vmap_gradients(model, rows)))
        want = bench.reference(attention, "fp32", "right")
        assert not set(got) & set(frozen)
        assert_same_gradients(got, {name: want[name] for name in got}, LIMITS["fp32"])
        B = len(rows["labels"])
        shapes = {f"({B}, {', '.join(map(str, order))})" for p in frozen.values() for order in (p.shape, p.shape[::-1])}
        made = [step for step in steps for shape in shapes if f" {shape}:" in step]
        assert not made, f"a gradient of a frozen parameter was computed: {made[0]}"

    def _freeze(self, model: Any) -> dict[str, torch.nn.Parameter]:
        """Freeze every matrix and return those whose gradient no other tensor of the model has the shape of."""
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.dim() < 2)
        # a matrix of one row has the shape of a vector's gradient
        return {name: p for name, p in model.named_parameters() if p.dim() == 2 and min(p.shape) > 1}
