"""The recorded answers about every causal language model: they are proven again, and the list tells what they say.

A rotating part of the model types is tried in every run, the others are slow. An answer must come out as recorded, also
one that says no: a model that became right has to be recorded again (`python -m opake.checking.sweep --write`).
"""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from opake import registry
from opake.checking import answers, sweep
from opake.checking.answers import Answer, Answers
from opake.cli import families as command
from opake.testing.cells import part_name

RECORDED = answers.for_version(transformers.__version__)
AT_A_TIME = 40
WANTED = 120
# proven with the torch of the record, and with an older one by some processors, which the note of the answer says
OTHER_TORCH = {("2.11", "5.24.0", "inkling2_text")}
pytestmark = pytest.mark.filterwarnings("ignore::opake.errors.GenericFamilyWarning")


def types() -> list[Any]:
    known = sorted(set(RECORDED.types) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    part = random.Random(part_name()).sample(known, AT_A_TIME)
    now = known if part_name() == "all" else part
    return [pytest.param(name, marks=() if name in now else pytest.mark.slow) for name in known]


@pytest.mark.parametrize("model_type", types())
def test_the_answer_is_as_recorded(model_type: str) -> None:
    found, recorded = sweep.answer(model_type), RECORDED.types[model_type]
    torch_version = torch.__version__.rpartition(".")[0]
    if (torch_version, transformers.__version__, model_type) in OTHER_TORCH:
        assert f"with torch {torch_version} more than 5e-6 on one of two processors" in recorded.note
        assert found.proven or "relative error" in found.reason, found
        return
    assert found.proven == recorded.proven, f"recorded {recorded}, found {found}"


def test_at_least_120_of_the_newest_are_right() -> None:
    newest = answers.load()[-1]
    assert len(newest.types) == 196
    assert sum(answer.proven for answer in newest.types.values()) >= WANTED


def test_a_version_that_is_recorded_is_recorded_whole() -> None:
    if RECORDED.transformers == transformers.__version__:
        assert set(RECORDED.types) == set(sweep.model_types())
    assert all(answer.reason or answer.error is not None for each in answers.load() for answer in each.types.values())


def test_families_of_the_distribution_are_proven() -> None:
    claimed = {claim.name for claim in registry.listed() if claim.source == "opake" and claim.status == "ok"}
    refuted = {name for name in claimed & set(RECORDED.types) if not RECORDED.types[name].proven}
    # routes by values there, whatever is patched
    assert refuted == ({"granitemoe"} if RECORDED.transformers == "5.8.0" else set())


class TestSweep:
    def test_a_wrong_gradient_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = sweep.vmap_grads
        wrong = lambda model, batch: {name: grad * 1.0001 for name, grad in right(model, batch).items()}  # noqa: E731
        monkeypatch.setattr(sweep, "vmap_grads", wrong)
        found = sweep.answer("opt")
        assert not found.proven
        assert found.reason.startswith("right padding: relative error 1.0e-04, 1e-04 from float64, the unpatched loop ")

    def test_another_plain_loss_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from opake import patches

        def spoil(model: Any) -> None:
            model.get_output_embeddings().weight.data.mul_(1.001)

        monkeypatch.setattr(patches, "apply_model_patches", spoil)
        assert sweep.answer("opt").reason == "right padding: another loss outside transforms"

    def test_what_restore_leaves_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from opake import patches

        real = patches.restore

        def careless(model: Any) -> None:
            real(model)
            model.left_behind = True

        monkeypatch.setattr(patches, "restore", careless)
        assert sweep.answer("opt").reason == "restore left .left_behind"

    @pytest.mark.parametrize("taken", [0, 1])
    def test_the_time_is_limited(self, taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also where code on the way takes the first sign for a failure of its own."""
        # once in full: an import that is cut short would stay broken for every test after this one
        assert sweep.answer("llama").error is not None

        def endless(*_: Any) -> Answer:
            for _ in range(taken):
                with contextlib.suppress(TimeoutError):
                    while True:
                        pass
            while True:
                pass

        monkeypatch.setattr(sweep, "_tried", endless)
        assert sweep.answer("llama", seconds=0.005).reason.startswith("TimeoutError: more than 0 s of processor time")

    def test_a_reason_is_one_short_line_with_a_place(self) -> None:
        found = sweep.answer("git")
        assert found.reason.endswith("(modeling_git.py, forward)")
        assert "\n" not in found.reason
        assert len(found.reason) < 330


class TestFile:
    def test_record_keeps_the_other_versions_in_order(self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(answers, "path", lambda: tmp_path / "generic.json")
        for version in ("5.24.0", "5.8.0", "5.24.0"):
            answers.record(Answers(version, "2.13.0", {"opt": Answer("M", 1.26e-7), "xlm": Answer(reason="no")}))
        assert [each.transformers for each in answers.load()] == ["5.8.0", "5.24.0"]
        assert answers.load()[0].types == {"opt": Answer("M", 1.3e-7), "xlm": Answer(reason="no")}
        assert answers.for_version("5.8.0").transformers == "5.8.0"
        assert answers.for_version("5.9.0").transformers == "5.24.0"

    def test_the_file_is_written_as_it_would_be_recorded(self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        shipped, text = answers.load(), answers.path().read_text(encoding="utf-8")
        monkeypatch.setattr(answers, "path", lambda: tmp_path / "generic.json")
        for each in shipped:
            answers.record(each)
        assert answers.path().read_text(encoding="utf-8") == text


class TestListing:
    def listed(self, capsys: Any) -> dict[str, dict[str, str]]:
        command.list_families(as_json=True, everything=True)
        rows = json.loads(capsys.readouterr().out)
        return {row["name"]: row for row in rows}

    def test_every_causal_language_model_has_an_answer(self, capsys: Any) -> None:
        rows = self.listed(capsys)
        assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) <= set(rows)
        states = {row["status"] for row in rows.values()}
        assert {"ok", "generic", "not supported"} <= states
        assert all(row["reason"] for row in rows.values() if row["status"] in ("generic", "not supported"))
        right = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if rows[name]["status"] in ("ok", "generic")]
        assert len(right) >= WANTED

    def test_a_proof_on_another_version_is_called_that(self, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.metadata.version", lambda name: "5.99.0")
        rows = self.listed(capsys)
        newest = answers.load()[-1].transformers
        elsewhere = f"on transformers {newest}; the installed 5.99.0 was not tested"
        assert rows["opt"]["status"] == "generic"
        assert rows["opt"]["reason"] == f"proven {elsewhere}"
        assert rows["xlm"]["reason"].endswith(f"({elsewhere})")

    def test_a_model_type_without_an_answer(self, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "brandnew", "BrandNewForCausalLM")
        row = self.listed(capsys)["brandnew"]
        assert row["status"] == "not tried"
        assert row["reason"].startswith("no answer is recorded")
