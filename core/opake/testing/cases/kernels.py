"""Cases about fused kernels: each one declared by the family is switched on by name and changes no number.

On a machine without CUDA a kernel runs as its plain twin, or in Triton's interpreter; a flag that no record of the
family answers is skipped with that reason.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

from opake.testing.cells import Cell
from opake.testing.oracle import batch_gradients
from opake.testing.switch import checkpointing
from opake.testing.vmapped import vmap_gradients

from .base import LIMITS, Suite, assert_close, assert_same_gradients
from .gradients import assert_cell

if TYPE_CHECKING:
    from opake.testing.workbench import Bench

FLAGS = ("rope", "rms_norm", "activation", "cross_entropy")
FUSIONS = ("fused_linear_cross_entropy", "lora_w", "lora_qkv", "lora_mlp")
EVERY = "every kernel"


def adapted(module: Any) -> bool:
    """Whether PEFT has an adapter anywhere in a module."""
    return any("lora_" in name for name, _ in module.named_parameters())


class KernelCases(Suite):
    @pytest.fixture
    def switched(self, bench: Bench, kernel: str) -> dict[str, bool]:
        """The flags to apply with; skips where the family has nothing for them."""
        return self._applicable(bench, FLAGS if kernel == EVERY else (kernel,))

    def _applicable(self, bench: Bench, wanted: Sequence[str]) -> dict[str, bool]:
        applied, reasons = bench.applicable(*wanted)
        if not applied:
            pytest.skip(reasons)
        return dict.fromkeys(applied, True)

    def test_every_record_is_served(self, bench: Bench) -> None:
        """What the family declares applies to its own model, with adapters on every linear layer."""
        model = bench.adapted(self.attentions[0])
        report = bench.apply(model, **dict.fromkeys((*FLAGS, *FUSIONS), True))
        served = ("applied", "already", "stock")
        unserved = [row for row in report.rows if row.hook != "core" and row.state not in served]
        # beside stacked experts PEFT adapts no linear layer of a dense MLP
        bare = {name for name, module in model.get_base_model().named_modules() if not adapted(module)}
        unserved = [row for row in unserved if not (row.flag == "lora_mlp" and row.site in bare)]
        assert not unserved, f"{len(unserved)} rows, first {unserved[0]}"

    @pytest.mark.parametrize("kernel", [*FLAGS, EVERY])
    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    def test_kernel_gradients(self, bench: Bench, attention: str, switched: dict[str, bool], dtype: str) -> None:
        model = bench.build(attention, dtype)
        bench.apply(model, **switched)
        for padding in ("right", "left"):
            cell = Cell(attention, padding, "T", dtype, "keep", "train")
            assert_cell(bench, cell, vmap_gradients(model, bench.batch(padding)))

    @pytest.mark.parametrize("kernel", [*FLAGS, EVERY])
    def test_kernel_forward_and_backward(self, bench: Bench, attention: str, switched: dict[str, bool]) -> None:
        stock, model = bench.stock(attention).train(), bench.build(attention)
        bench.apply(model, **switched)
        rows = bench.batch()
        got, want = model(**rows), stock(**rows)
        assert math.isfinite(got.loss.item())
        assert_close(got.loss, want.loss)
        assert_close(got.logits, want.logits)
        rounding = functools.partial(bench.rounding, attention, each=False)
        assert_same_gradients(batch_gradients(model, **rows), batch_gradients(stock, **rows), LIMITS["fp32"], rounding)

    @pytest.mark.parametrize("padding", ["right", "left"])
    def test_loss_only(self, bench: Bench, attention: str, padding: str) -> None:
        """A call that asks for the loss alone gets it without logits, and the same gradients."""
        switched = self._applicable(bench, ("fused_linear_cross_entropy",))
        model, rows = bench.build(attention), bench.batch(padding)
        bench.apply(model, **switched)
        out, want = model(**rows, loss_only=True), bench.stock(attention).train()(**rows)
        assert out.logits is None
        assert_close(out.loss, want.loss)
        assert_close(model(**rows).logits, want.logits)
        got = vmap_gradients(model, rows, loss_only=True)
        rounding = functools.partial(bench.rounding, attention)
        assert_same_gradients(got, bench.reference(attention, "fp32", padding), LIMITS["fp32"], rounding)

    @pytest.mark.parametrize("state", ["keep", "ckpt"])
    @pytest.mark.parametrize("padding", ["right", "left"])
    def test_lora_with_every_kernel(self, bench: Bench, attention: str, padding: str, state: str) -> None:
        model = bench.adapted(attention)
        bench.apply(model, **dict.fromkeys((*FLAGS, *FUSIONS), True))
        with checkpointing(model, state == "ckpt"):
            got = vmap_gradients(model, bench.batch(padding))
        assert_same_gradients(got, bench.adapted_reference(attention, padding), LIMITS["fp32"])
