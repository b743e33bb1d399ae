"""Is a family right? Per-example gradients of a patched tiny model against a loop over an unpatched copy.

The loop is one ordinary `backward()` a row with the attention implementation that the model was built with. Speed and
GPU kernels are left to the tests; kernels run here through their plain twins, each switched on by name.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from opake import registry
from opake.checking.judge import TOLERANCE, beside_padding, judged, loop_grads, vmap_grads
from opake.checking.tiny import tiny_batch, tiny_model
from opake.errors import GenericFamilyWarning, UnknownFamily

if TYPE_CHECKING:
    import torch

KERNELS = ("rope", "rms_norm", "activation", "cross_entropy")
# name of the check: (padding, flags)
CASES: Mapping[str, tuple[str, dict[str, bool]]] = {
    "right": ("right", {}),
    "left": ("left", {}),
    "unpadded": ("none", {}),
    "kernels": ("right", dict.fromkeys(KERNELS, True)),
}


@dataclass
class Outcome:
    """What a check found: errors by case, whether `restore` was complete, and every reason to call it a failure.

    notes: of cases that are right though the number alone does not say so.
    """

    model_type: str
    family: str = "-"
    model: str = "-"
    attention: str = "-"
    errors: dict[str, float] = field(default_factory=dict)
    restored: bool | None = None
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def cells(self) -> tuple[str, ...]:
        errors = (f"{self.errors[case]:.1e}" if case in self.errors else "-" for case in CASES)
        restored = "-" if self.restored is None else "yes" if self.restored else "FAIL"
        return (
            self.model_type,
            self.family,
            self.model,
            self.attention,
            *errors,
            restored,
            "FAIL" if self.failures else "ok",
        )


def check_family(model_type: str) -> Outcome:
    """Run every case; what goes wrong becomes a reason in the outcome and stops this family only."""
    outcome = Outcome(model_type)
    try:
        with warnings.catch_warnings():
            # the column "family" says it
            warnings.simplefilter("ignore", GenericFamilyWarning)
            _check(model_type, outcome)
    except Exception as error:
        outcome.failures.append(f"{type(error).__name__}: {error}")
    return outcome


def _check(model_type: str, outcome: Outcome) -> None:
    from opake.patches import apply_model_patches, restore

    _check_plan(model_type, outcome)
    stock = tiny_model(model_type)
    model = copy.deepcopy(stock)
    outcome.model, outcome.attention = type(model).__name__, str(model.config._attn_implementation)
    before = attributes(model)
    for case, (padding, flags) in CASES.items():
        batch = tiny_batch(padding=padding)
        apply_model_patches(model, **flags)
        error, right, note = judged(vmap_grads(model, batch), loop_grads(stock, batch), stock, batch)
        if not right and padding == "left":
            error, right, note = beside_padding(model, stock, batch)
        restore(model)
        outcome.errors[case] = error
        if not right:
            outcome.failures.append(f"{case}: relative error {error:.1e} is above {TOLERANCE:.0e}; {note}")
        elif note:
            outcome.notes.append(note if note.startswith(case) else f"{case}: {note}")
    left = differences(before, attributes(model))
    outcome.restored = not left
    if left:
        outcome.failures.append(f"restore left {', '.join(left[:3])}" + (" and more" if len(left) > 3 else ""))


def _check_plan(model_type: str, outcome: Outcome) -> None:
    """Every class that the family names must exist; an unregistered model type has no plan to check."""
    from opake import hf, planning

    try:
        family = registry.load(model_type)
    except UnknownFamily:
        outcome.family = "generic"
        return
    outcome.family = family.claim.source
    for row in family.plan(*planning.modeling(family)):
        absent = getattr(row.record, "cls", None)
        if isinstance(absent, hf.Absent):
            outcome.failures.append(f"{row.record} ({row.source}): {absent.reason}")


def attributes(model: torch.nn.Module) -> dict[str, Any]:
    """Every instance attribute of every module, and every entry of those that are dictionaries (hooks, buffers)."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            found[f"{name}.{key}"] = value
            if isinstance(value, dict):
                found |= {f"{name}.{key}[{inner!r}]": entry for inner, entry in value.items()}
    config = getattr(model, "config", None)
    return found | {f"config.{key}": value for key, value in vars(config).items()}


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    missing = object()
    return [name for name in {**before, **after} if not _same(before.get(name, missing), after.get(name, missing))]


def _same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, str | int | float) and one == other)
