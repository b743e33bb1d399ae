"""Cases about the plugin as a piece of packaging: claimed once, light to import, hooks that say what is there."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

from opake import hf, registry
from opake.hookspecs import HOOKS

from .base import Suite

if TYPE_CHECKING:
    from opake.testing.workbench import Bench

HEAVY = ("torch", "transformers", "triton", "peft")


class PluginCases(Suite):
    def test_claimed_once(self) -> None:
        claims = [claim for claim in registry.listed() if claim.name == self.model_type]
        assert [claim.status for claim in claims] == ["ok"], f"claims of {self.model_type!r}: {claims}"

    def test_imports_without_torch(self) -> None:
        code = (
            f"import sys; from opake import registry; registry.load({self.model_type!r});"
            f"print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.split() == []

    def test_hooks_validate(self, bench: Bench) -> None:
        planned = self._plan(bench)
        assert {row.hook for row in planned} <= set(HOOKS)
        records = [row.record for row in planned]
        twice = [str(record) for index, record in enumerate(records) if record in records[:index]]
        assert not twice, f"declared twice: {twice}"

    def test_every_site_exists(self, bench: Bench) -> None:
        model = bench.stock(self.attentions[0])
        for row in self._plan(bench):
            absent = getattr(row.record, "cls", None)
            assert not isinstance(absent, hf.Absent), f"{row.source}: {absent.reason}"
            assert list(row.record.sites(model)), f"{row.source}: {row.record} has no site in {type(model).__name__}"

    def _plan(self, bench: Bench) -> list[Any]:
        model = bench.stock(self.attentions[0])
        modeling = hf.ModelingModule(hf.modeling_module(model))
        return registry.load(hf.model_type(model)).plan(modeling, model.config)
