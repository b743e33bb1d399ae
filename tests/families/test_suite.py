"""The suite finds what is wrong with a family: plugins with one fault each, for a model that is otherwise right."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from transformers.models.llama.modeling_llama import LlamaMLP

from opake.testing import FamilySuite, cells
from opake.testing.cells import Cell
from opake.testing.isolated import Distribution, isolated_registry
from opake.testing.workbench import Bench

CELL = Cell("sdpa", "right", "T", "fp32", "keep", "train")

HEAD = """
from opake.patching.undo import Undo, put
from opake.patching.instance import wrap_method
from opake.records import *
from opake.records import ClassRecord

@hookimpl
def opake_kernel_patches(hf, config):
    yield from records(hf)

class Custom(ClassRecord):
    __slots__ = ()
    flag = "batchify"
    def fits(self, module):
        return None

"""

SOUND = "def records(hf):\n    yield RMSNorm(hf.LlamaRMSNorm)\n"

ABSENT = "def records(hf):\n    yield RMSNorm(hf.LlamaNorm)\n"

TWICE = SOUND + "    yield RMSNorm(hf.LlamaRMSNorm)\n"

LEAKS = """
class Leak(Custom):
    __slots__ = ()
    def apply(self, module):
        stock = type(module).forward
        type(module).forward = lambda self, x: stock(self, x)
        return Undo()

def records(hf):
    yield Leak(hf.LlamaMLP)
"""

NOT_UNDONE = """
class Forgetful(Custom):
    __slots__ = ()
    def apply(self, module):
        module.mine = 1
        return Undo()

def records(hf):
    yield Forgetful(hf.LlamaMLP)
"""

WRONG = """
def unrotated(q, k, cos, sin, unsqueeze_dim=1):
    return q, k

def records(hf):
    yield Replace(hf.LlamaAttention, "apply_rotary_pos_emb", unrotated)
"""

# what one call sees depends on the calls before it: the rows of another batch
REMEMBERS = """
seen = []

def remembering(inner, self, x):
    seen.append(1)
    return inner(self, x) * (1 + len(seen) * 1e-3)

class Remember(Custom):
    __slots__ = ()
    def apply(self, module):
        return Undo([wrap_method(module, "forward", remembering)])

def records(hf):
    yield Remember(hf.LlamaMLP)
"""

# a run inside a worker of pytest-xdist would make this plugin warn, where somebody has it
QUIET = ("-p", "no:benchmark")
SUITE = """
from opake.testing import FamilySuite

class TestFamily(FamilySuite):
    model_type = "llama"
    attentions = ("sdpa",)
    without = {"deepcopy": "its own reason"}
"""


class Family(FamilySuite):
    """Not collected under this name; its cases are called by hand."""

    model_type = "llama"
    attentions = ("sdpa",)


def run(source: str, case: str, *others: Distribution, **arguments: Any) -> None:
    """One case of the suite on a family that is this source."""
    plugin = Distribution("fam", families={"llama": "fam_under_test"}, modules={"fam_under_test": HEAD + source})
    method = getattr(Family(), f"test_{case}")
    with isolated_registry(plugin, *others):
        bench = Bench(Family)
        given = {"bench": bench, "attention": "sdpa", "padding": "right", **arguments}
        if "pair" in (names := inspect.signature(method).parameters):
            given["pair"] = bench.stock("sdpa").eval(), bench.patched("sdpa").eval()
        try:
            method(**{name: given[name] for name in names})
        finally:
            bench.close()


@pytest.mark.parametrize(
    ("source", "case", "arguments", "message"),
    [
        pytest.param(ABSENT, "every_site_exists", {}, "has no LlamaNorm", id="a-class-that-is-not-there"),
        pytest.param(TWICE, "hooks_validate", {}, "declared twice", id="a-record-twice"),
        pytest.param(NOT_UNDONE, "restore_is_identical", {}, "mlp.mine is new: 1", id="a-change-not-undone"),
        pytest.param(WRONG, "forward_and_backward", {}, "relative error", id="a-wrong-forward"),
        pytest.param(WRONG, "per_example_gradients", {"cell": CELL}, "relative error", id="wrong-gradients"),
        pytest.param(WRONG, "per_example_gradients", {"cell": CELL._replace(dtype="bf16")}, "twice", id="wrong-bf16"),
        pytest.param(WRONG, "generate", {}, "sequences", id="wrong-tokens"),
        pytest.param(REMEMBERS, "row_is_independent", {"dtype": "fp32"}, "row 1 differs", id="memory-of-calls"),
    ],
)
def test_a_fault_is_found_and_a_sound_family_passes(
    source: str, case: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        run(source, case, **arguments)
    run(SOUND, case, **arguments)


def test_a_leak_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    # put back what the faulty plugin leaves behind
    monkeypatch.setattr(LlamaMLP, "forward", LlamaMLP.forward)
    with pytest.raises(AssertionError, match=r"LlamaMLP\.forward was <function"):
        run(LEAKS, "nothing_leaks")


def test_a_second_claim_is_found() -> None:
    rival = Distribution("rival", families={"llama": "rival_family"}, modules={"rival_family": HEAD + SOUND})
    with pytest.raises(AssertionError, match="conflict"):
        run(SOUND, "claimed_once", rival)


def test_what_a_suite_leaves_out_is_skipped_with_its_reason(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_family=SUITE)
    result = pytester.runpytest_inprocess(*QUIET, "-p", "opake.testing", "-q", "-rs", "-k", "test_deepcopy")
    assert result.parseoutcomes()["skipped"] == 1
    result.stdout.fnmatch_lines(["SKIPPED*its own reason"])


def test_the_run_says_which_cells_it_takes(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cells.PART, "2026-W07")
    pytester.makepyfile(test_family=SUITE)
    result = pytester.runpytest_inprocess(*QUIET, "-p", "opake.testing", "--collect-only", "-q", "-v", "-m", "not slow")
    result.stdout.fnmatch_lines([f"opake: part 2026-W07*{cells.PART}=2026-W07 repeats it*"])
    taken = [line for line in result.outlines if "test_per_example_gradients" in line]
    assert len(taken) == len(cells.chosen("TestFamily", cells.grid(["sdpa"]), "2026-W07"))


@pytest.mark.parametrize("attentions", [("sdpa", "eager"), ("eager",)])
def test_a_part_covers_every_pair_of_values_and_rotates(attentions: tuple[str, ...]) -> None:
    everything = cells.grid(attentions)
    parts = [cells.chosen("TestFamily", everything, f"2026-W{week:02}") for week in range(1, 5)]
    pairs = set().union(*(cells._pairs(cell) for cell in everything))
    for part in parts:
        assert set().union(*(cells._pairs(cell) for cell in part)) == pairs
        assert len(part) < len(everything) / 4
    assert len({frozenset(part) for part in parts}) == 4
    assert cells.chosen("TestFamily", everything, "all") == set(everything)
    assert cells.chosen("TestOther", everything, "2026-W01") != parts[0]
