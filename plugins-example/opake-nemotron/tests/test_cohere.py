"""The extension: Command R gets the kernel of this distribution for its norm, and is still right."""

import pytest

from opake import planning, registry
from opake.checking.family import check_family
from opake.checking.tiny import tiny_model
from opake.patches import apply_model_patches


def test_the_extension_is_asked_after_the_family():
    family, planned = planning.plan("cohere")
    assert [claim.source for claim in family.extensions] == ["opake-nemotron"]
    (added,) = [row for row in planned if str(row.record) == "LayerNorm(CohereLayerNorm)"]
    assert added.source.startswith("opake_nemotron/cohere.py:")


def test_the_norm_runs_the_kernel():
    report = apply_model_patches(tiny_model("cohere"), rms_norm=True)
    rows = report.find(record="LayerNorm(CohereLayerNorm)")
    assert rows
    assert {row.state for row in rows} == {"applied"}


def test_the_extended_family_is_right():
    assert check_family("cohere").failures == []


def test_blocking_the_extension_leaves_the_family(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(registry.BLOCK, "opake-nemotron:cohere")
    family, planned = planning.plan("cohere")
    assert family.extensions == ()
    assert not any("LayerNorm" in str(row.record) for row in planned)
