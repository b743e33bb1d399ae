"""The conformance suite: a family names its model_type, and inherits the tests that every family must pass.

    from opake.testing import FamilySuite

    class TestNemotron(FamilySuite):
        model_type = "nemotron"

With `pytest_plugins = "opake.testing"` in the top conftest.py, pytest collects every `test_` method. A suite adds what
is special to its family as further methods, which may use the fixtures `bench`, `attention` and `cell`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from opake.errors import GenericFamilyWarning, UnknownFamily
from opake.patches import apply_model_patches
from opake.patching import target

from .cases.experts import ExpertCases
from .cases.gradients import GradientCases
from .cases.kernels import KernelCases
from .cases.lora import LoraCases
from .cases.patching import PatchingCases
from .cases.plugin import PluginCases
from .cases.rows import RowCases
from .cases.stock import StockCases

if TYPE_CHECKING:
    from .workbench import Bench


class ModelSuite(PatchingCases, StockCases, GradientCases, RowCases, LoraCases):
    """What a model must do, with or without a plugin of its own; see `Suite` for the settings."""


class FamilySuite(PluginCases, ModelSuite, KernelCases):
    """What a family with a plugin must do."""


class MoESuite(FamilySuite, ExpertCases):
    """What a family of mixtures of experts must do."""


class GenericSuite(ModelSuite):
    """What a model_type without a plugin must do: the same, through the generic patches and with one warning."""

    def test_warns_once(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(target, "_warned", set())
        with pytest.warns(GenericFamilyWarning, match=f"'{self.model_type}'") as caught:
            apply_model_patches(bench.build(self.attentions[0]))
        assert [warning.filename for warning in caught] == [__file__]
        # a second warning would be an error
        apply_model_patches(bench.build(self.attentions[0]))

    def test_strict_refuses(self, bench: Bench) -> None:
        with pytest.raises(UnknownFamily, match=f"'{self.model_type}'"):
            apply_model_patches(bench.build(self.attentions[0]), strict=True)
