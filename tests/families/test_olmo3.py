"""OLMo 3: as OLMo 2, with sliding layers."""

from __future__ import annotations

from opake.testing import FamilySuite


class TestOlmo3(FamilySuite):
    model_type = "olmo3"
