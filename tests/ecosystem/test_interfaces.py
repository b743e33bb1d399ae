"""Upgrades that take something away are named: in a warning, by the doctor, and in the report of one record."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from transformers.loss import loss_utils

from opake.batching import loss
from opake.checking.tiny import tiny_model
from opake.cli import doctor, main
from opake.errors import ChangedInterfaceWarning, PatchError
from opake.patches import apply_model_patches, apply_runtime_patches, restore_runtime
from opake.patching import interfaces
from opake.testing.isolated import Distribution, isolated_registry

ROOT = Path(__file__).parents[2]

FAMILY = """
from dataclasses import dataclass
from typing import ClassVar
from opake.records import ClassRecord, CrossEntropy, RMSNorm, hookimpl

@dataclass(frozen=True, slots=True)
class Asks(ClassRecord):
    flag: ClassVar[str] = "rms_norm"
    where: str = "fits"
    def sites(self, model):
        if self.where == "sites":
            from transformers import NoSuchThing
        return ClassRecord.sites(self, model)
    def fits(self, module):
        return module.no_such_attribute

@hookimpl
def opake_kernel_patches(hf):
    yield RMSNorm(hf.LlamaNorm)
    yield RMSNorm(hf.LlamaNorm.Inner)
    yield Asks(hf.LlamaRMSNorm)
    yield Asks(hf.LlamaMLP, where="sites")
    yield CrossEntropy(hf.LlamaForCausalLM)
"""


@pytest.fixture(autouse=True)
def asked_anew():
    interfaces._warn.cache_clear()
    yield
    interfaces._warn.cache_clear()


def test_the_installed_libraries_have_every_interface() -> None:
    assert interfaces.changed() == {}


def test_what_is_gone_is_named_with_what_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(loss_utils, "ForMaskedLMLoss")
    monkeypatch.setattr(loss_utils, "ForCausalLMLoss", lambda logits, labels: None)
    found = interfaces.changed()
    assert found["the loss of a row (batchify)"].startswith("transformers.loss.loss_utils.ForMaskedLMLoss is gone")
    assert found["the loss of a row (batchify, cross_entropy)"] == (
        "transformers.loss.loss_utils.ForCausalLMLoss takes no vocab_size, num_items_in_batch, ignore_index,"
        " shift_labels any more"
    )


@pytest.mark.parametrize("patch", [lambda: apply_model_patches(tiny_model("llama")), apply_runtime_patches])
def test_patching_warns_once(patch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = interfaces.Interface("transformers.NoSuchInterface", "nothing at all")
    monkeypatch.setattr(interfaces, "INTERFACES", (*interfaces.INTERFACES, gone))
    with pytest.warns(ChangedInterfaceWarning, match=r"NoSuchInterface is gone .* \(needed for nothing at all\)"):
        patch()
    # a second warning would be an error
    patch()
    restore_runtime()


def test_a_family_that_misses_a_name_loses_that_record_only() -> None:
    plugin = Distribution("fam", families={"llama": "fam_missing"}, modules={"fam_missing": FAMILY})
    with isolated_registry(plugin):
        report = apply_model_patches(tiny_model("llama"), rms_norm=True, cross_entropy=True)
    rows = {row.record: row for row in report.rows if row.hook == "opake_kernel_patches"}
    assert {name: row.state for name, row in rows.items()} == {
        "RMSNorm(LlamaNorm)": "skipped",
        "RMSNorm(LlamaNorm.Inner)": "skipped",
        "Asks(LlamaRMSNorm)": "skipped",
        "Asks(LlamaMLP, 'sites')": "skipped",
        "CrossEntropy(LlamaForCausalLM)": "applied",
    }
    assert rows["RMSNorm(LlamaNorm.Inner)"].reason.endswith("has no LlamaNorm.Inner")
    assert "no_such_attribute" in rows["Asks(LlamaRMSNorm)"].reason
    assert "NoSuchThing" in rows["Asks(LlamaMLP, 'sites')"].reason


def test_the_core_does_not_go_on_without_what_keeps_numbers_right(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(module: object) -> None:
        raise ImportError("cannot import name 'ForCausalLMLoss'")

    monkeypatch.setattr(loss, "fits", gone)
    model = tiny_model("llama")
    with pytest.raises(PatchError, match=r"PerExampleLoss does not fit .* leave it out with batchify=False"):
        apply_model_patches(model)
    assert "_opake" not in vars(model)


def test_the_doctor_tells_of_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "INTERFACES", (interfaces.Interface("torch.no_such_thing", "something"),))
    with pytest.raises(SystemExit) as done:
        main(["doctor", "--json"])
    assert done.value.code == 1
    (finding,) = [f for f in json.loads(capsys.readouterr().out) if f["what"] == "interface"]
    assert finding["state"] == "missing"
    assert finding["cost"] == "needed for something"


@pytest.mark.parametrize(("version", "state"), [("5.24.0", "ok"), ("5.8.0", "ok"), ("5.7.9", "note"), ("6.1", "note")])
def test_the_doctor_shows_the_tested_range(version: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: version if name == "transformers" else "2.12")
    (finding,) = [f for f in doctor._tested() if f.what == "tested transformers"]
    assert finding.found == "5.8.0 to 5.24.0"
    assert finding.state == state


def test_the_tested_range_is_that_of_what_is_run() -> None:
    """`make test`, and the rows of the matrix; one that was not run, or failed, is not claimed."""
    rows = {row["target"]: row for row in json.loads((resources.files("opake") / "data" / "tested.json").read_text())}
    makefile = (ROOT / "Makefile").read_text()
    (names,) = re.findall(r"^MATRIX := (.*)$", makefile, re.MULTILINE)
    assert list(rows) == ["ci", *(name for name in names.split() if name in rows)]
    assert "floor" in rows
    for name, row in rows.items():
        file = ROOT / ("constraints.txt" if name == "ci" else f"tests/matrix/{name}.txt")
        pins = dict(re.findall(r"^(transformers|torch|peft)==([\d.]+?)(?:\.\*)?$", file.read_text(), re.MULTILINE))
        assert all(pinned.startswith(row[library]) for library, pinned in pins.items())
        wanted = re.findall(rf"^matrix-{name}: PYTHON := python(.*)$", makefile, re.MULTILINE)
        assert [row["python"]] == (wanted or ["3.11"])
