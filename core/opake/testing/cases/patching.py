"""Cases about patching as an act: done once, seen by nobody else, taken back object by object, and copied whole."""

# ruff: noqa: TID253
from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from opake.patches import apply_model_patches, patch_report, restore
from opake.testing.snapshot import differences, imported, library_snapshot, model_snapshot
from opake.testing.tables import refresh
from opake.testing.vmapped import vmap_gradients

from .base import Suite, assert_bitwise, assert_close

if TYPE_CHECKING:
    from opake.testing.workbench import Bench


class PatchingCases(Suite):
    def test_patched_twice_is_patched_once(self, bench: Bench, attention: str) -> None:
        model = bench.build(attention)
        first = bench.apply(model)
        assert first.find(state="applied")
        before = model_snapshot(model)
        second = bench.apply(model)
        assert not second.find(state="applied")
        assert {(row.record, row.site) for row in second.find(state="already")} == {
            (row.record, row.site) for row in first.find(state="applied")
        }
        changed = [text for text in differences(before, model_snapshot(model)) if not text.startswith("model._opake")]
        assert changed == []

    def test_nothing_leaks(self, bench: Bench, attention: str) -> None:
        model = bench.build(attention)
        # a second model that shares the very config object of the first
        twin = type(model)(model.config).eval()
        modules = imported()
        library, second = library_snapshot(modules), model_snapshot(twin)
        bench.apply(model)
        vmap_gradients(model, bench.batch())
        assert list(differences(library, library_snapshot(modules))) == []
        assert list(differences(second, model_snapshot(twin))) == []
        restore(model)
        assert list(differences(library, library_snapshot(modules))) == []

    def test_restore_is_identical(self, bench: Bench, attention: str) -> None:
        model = bench.build(attention)
        before = model_snapshot(model)
        bench.apply(model)
        vmap_gradients(model, bench.batch())
        model(**bench.batch()).loss.backward()
        model.zero_grad()
        restore(model)
        refresh(model)
        assert list(differences(before, model_snapshot(model))) == []
        assert patch_report(model) is None

    def test_deepcopy(self, bench: Bench, attention: str) -> None:
        model = bench.build(attention)
        bench.apply(model)
        rows = bench.batch()
        want = vmap_gradients(model, rows)
        twin = copy.deepcopy(model)
        for row, got in ((row, vmap_gradients(twin, rows)) for row in range(len(rows["labels"]))):
            assert_bitwise(got, want, row)
        before = model_snapshot(model)
        restore(twin)
        assert list(differences(before, model_snapshot(model))) == []
        assert patch_report(twin) is None
        assert_close(twin(**rows).logits, bench.stock(attention)(**rows).logits)
        assert_bitwise(vmap_gradients(model, rows), want, 0)

    def test_state_dict_keys(self, bench: Bench, attention: str) -> None:
        stock, patched = bench.stock(attention), bench.patched(attention)
        assert list(patched.state_dict()) == list(stock.state_dict())
        assert [name for name, _ in patched.named_modules()] == [name for name, _ in stock.named_modules()]
        assert [name for name, _ in patched.named_parameters()] == [name for name, _ in stock.named_parameters()]

    def test_save_and_load(self, bench: Bench, attention: str, tmp_path: Path) -> None:
        stock, patched = bench.stock(attention), bench.patched(attention)
        stock.save_pretrained(tmp_path / "stock")
        patched.save_pretrained(tmp_path / "patched")
        names = [sorted(file.name for file in (tmp_path / side).iterdir()) for side in ("stock", "patched")]
        assert names[0] == names[1]
        configs = [json.loads((tmp_path / side / "config.json").read_text()) for side in ("stock", "patched")]
        assert configs[0] == configs[1]
        # not compared with the model that was saved: some configs change when they are read again
        want, got = (
            type(stock).from_pretrained(tmp_path / side, attn_implementation=attention) for side in ("stock", "patched")
        )
        torch.testing.assert_close(got.state_dict(), stock.state_dict(), rtol=0, atol=0)
        assert_close(got(**bench.batch()).logits, want(**bench.batch()).logits)

    def test_a_bad_option_changes_nothing(self, bench: Bench) -> None:
        import pytest

        from opake.errors import UnknownOption

        model = bench.build(self.attentions[0])
        before = model_snapshot(model)
        with pytest.raises(UnknownOption, match="batchify"):
            apply_model_patches(model, batchfy=True)
        assert list(differences(before, model_snapshot(model))) == []
