"""What every case of the suite sees: the attributes that a suite sets, and the comparisons that all cases share."""

# ruff: noqa: TID253
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.utils._pytree import tree_leaves

from opake.testing.cells import DTYPES
from opake.testing.oracle import relative_errors

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# relative to the largest entry of each tensor; float64 leaves no room for a wrong formula
LIMITS = {"fp32": 5e-6, "fp64": 1e-9}
# a gradient smaller than this share of the model's largest one is rounding noise
NOISE = 1e-4


class Suite:
    """Settings of a suite; a subclass names at least `model_type`.

    model_type: as in the config of the family's checkpoints
    config: overrides of the tiny config that is derived from the config class, or a whole config
    attentions: the implementations that the family can be loaded with, the usual one first
    flags: given to every `apply_model_patches` of the suite
    causal: whether the first tokens of a sequence are computed as if they were alone: not so with bidirectional
        attention, nor where the rotary table depends on the length
    without: tests that the family cannot pass, by name without `test_`, each with the reason that is printed
    dtypes: those of the grid of cells; without `fp64` where a layer computes in float32 whatever it is given
    """

    model_type: ClassVar[str]
    config: ClassVar[Mapping[str, Any] | PreTrainedConfig] = {}
    attentions: ClassVar[tuple[str, ...]] = ("sdpa", "eager")
    flags: ClassVar[Mapping[str, Any]] = {}
    causal: ClassVar[bool] = True
    without: ClassVar[Mapping[str, str]] = {}
    dtypes: ClassVar[tuple[str, ...]] = DTYPES

    @classmethod
    def settle(cls, model: torch.nn.Module) -> None:
        """Move parameters of a fresh model, in place, to where the family's own arithmetic in float32 is accurate."""

    @classmethod
    def inputs(cls, rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Rows as this family wants them: add what its forward needs besides ids, labels and mask."""
        return rows


def assert_same_gradients(
    got: Mapping[str, torch.Tensor],
    want: Mapping[str, torch.Tensor],
    limit: float,
    rounding: Callable[[], Mapping[str, float]] = dict,
) -> None:
    """Fail with the worst parameter by name, and both magnitudes.

    rounding: asked where the limit is exceeded, for how far the stock model is from itself in each parameter; twice as
        much is no error
    """
    assert got.keys() == want.keys(), f"different parameters: {sorted(got.keys() ^ want.keys())}"
    errors = relative_errors(got, want)
    if max(errors.values()) <= limit:
        return
    own = rounding()
    # a stock model that is not finite allows nothing
    allowed = {name: 2 * error for name, error in own.items() if math.isfinite(error)}
    errors = {name: error for name, error in errors.items() if not error <= max(limit, allowed.get(name, 0.0))}
    if not errors:
        return
    worst = max(errors, key=errors.__getitem__)
    raise AssertionError(
        f"relative error {errors[worst]:.2e} > {limit:.0e} in {worst}, largest entry {got[worst].abs().max():.3e} for "
        f"{want[worst].abs().max():.3e}; the stock model is {own.get(worst, 0.0):.1e} from itself"
    )


def assert_close(got: Any, want: Any, limit: float = LIMITS["fp32"]) -> None:
    """Every tensor of two nested results; ones that are equal bit for bit may be infinite or nan."""
    ours, theirs = _tensors(got), _tensors(want)
    assert [t.shape for t in ours] == [t.shape for t in theirs]
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if torch.equal(a, b):
            continue
        scale = b.abs().max().item()
        error = (a.double() - b.double()).abs().max().item() / (scale or math.inf)
        assert error <= limit, f"tensor {index} of shape {tuple(a.shape)}: relative error {error:.2e} > {limit:.0e}"


def mean_error(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> float:
    """Distance of each parameter's gradients, relative to their norm, averaged over parameters.

    In low precision the largest single deviation is a matter of luck; the mean is not.
    """
    norms = {name: float(tensor.double().norm()) for name, tensor in want.items()}
    floor = NOISE * max(norms.values())
    errors = [float((got[name].double() - want[name].double()).norm()) / max(norms[name], floor) for name in want]
    return sum(errors) / len(errors)


def assert_bitwise(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor], row: int) -> None:
    """One row of two sets of per-example gradients, bit for bit."""
    unequal = [name for name in want if not torch.equal(got[name][row], want[name][row])]
    assert not unequal, f"row {row} differs in {len(unequal)} of {len(want)} parameters, first {unequal[0]}"


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
