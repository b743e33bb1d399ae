"""Cases with adapters: a PEFT LoRA on every linear layer, plain, frozen below, checkpointed and merged."""

# ruff: noqa: TID253
from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch

from opake.patches import restore
from opake.testing.snapshot import differences, imported, library_snapshot, model_snapshot
from opake.testing.switch import checkpointing
from opake.testing.vmapped import vmap_gradients

from .base import LIMITS, Suite, assert_close, assert_same_gradients

if TYPE_CHECKING:
    from opake.testing.workbench import Bench


class LoraCases(Suite):
    @pytest.mark.parametrize("padding", ["right", "left"])
    @pytest.mark.parametrize("state", ["keep", "ckpt"])
    @pytest.mark.parametrize("shape", ["T", "1xT"])
    def test_lora_gradients(self, bench: Bench, attention: str, padding: str, state: str, shape: str) -> None:
        model = bench.adapted(attention)
        bench.apply(model)
        with checkpointing(model, state == "ckpt"):
            got = vmap_gradients(model, bench.batch(padding), shape=shape)
        assert got
        assert all("lora_" in name for name in got)
        assert_same_gradients(got, bench.adapted_reference(attention, padding), LIMITS["fp32"])

    def test_lora_leaks_nothing(self, bench: Bench, attention: str) -> None:
        model = bench.adapted(attention)
        # once before looking: lazy modules load, and copies leave their marks on classes
        bench.apply(model)
        vmap_gradients(model, bench.batch())
        restore(model)
        modules = imported()
        library, before = library_snapshot(modules), model_snapshot(model)
        bench.apply(model)
        vmap_gradients(model, bench.batch())
        assert list(differences(library, library_snapshot(modules))) == []
        restore(model)
        assert list(differences(before, model_snapshot(model))) == []

    def test_lora_forward_and_generate(self, bench: Bench, attention: str) -> None:
        stock = bench.adapted(attention).eval()
        model = copy.deepcopy(stock)
        bench.apply(model)
        rows = bench.batch("left")
        assert_close(model(**rows).logits, stock(**rows).logits)
        rows.pop("labels")
        fixed = {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None}
        assert torch.equal(model.generate(**rows, **fixed), stock.generate(**rows, **fixed))
        with model.disable_adapter():
            assert_close(model(**rows).logits, bench.stock(attention).eval()(**rows).logits)
