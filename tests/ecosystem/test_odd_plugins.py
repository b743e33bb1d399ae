"""Plugins as people write them by mistake: each costs its own model type, is named with its line, changes no model."""

from __future__ import annotations

import pytest

from opake import planning, registry
from opake.checking.tiny import tiny_model
from opake.cli import doctor
from opake.errors import FamilyImportError, FamilyInvalid
from opake.patches import apply_model_patches
from opake.testing.isolated import Distribution, isolated_registry

HEAD = "from opake.records import *\nfrom opake.records import hookimpl\n"
HOOK = HEAD + "@hookimpl\ndef opake_kernel_patches(hf):\n"
WRAPPER = HEAD + "@hookimpl(wrapper=True)\ndef opake_kernel_patches():\n"
RECORD = f"""
{HEAD}
class Own(Record):
    flag = "rms_norm"
    def sites(self, model):
        yield "norm", model.model.norm
    def __str__(self):
        return "Own"
    {{}}

@hookimpl
def opake_kernel_patches(hf):
    yield RMSNorm(hf.LlamaRMSNorm)
    yield Own()
"""


def plugin(source: str, name: str = "odd", group: str = "families") -> Distribution:
    return Distribution(name, **{group: {"llama": name}}, modules={name: source})


# what `opake families show` and patching say alike
PLANS = {
    "a name for a class": (
        HOOK + "    yield RMSNorm('LlamaRMSNorm')",
        r"RMSNorm\('LlamaRMSNorm'\) .*odd.py:5\) was given",
    ),
    "nothing for a class": (HOOK + "    yield GatedMLP(None)", r"was given None, no class; write GatedMLP\(hf\.NameOf"),
    "a class for a module": (HOOK + "    yield Rotary(hf.LlamaMLP)", r"write Rotary\(hf\)"),
    "no record": (
        HOOK + "    return [type('R', (), dict.fromkeys(['sites', 'fits', 'apply'], print), )()]",
        "is no opake.records.Record; subclass",
    ),
    "an unknown flag": (
        RECORD.format("").replace("rms_norm", "rms"),
        "Own .* has the flag 'rms'; the flags of a model",
    ),
    "a runtime flag": (RECORD.format("").replace("rms_norm", "empty_batches"), "has the flag 'empty_batches'"),
    "an exit": (HOOK + "    raise SystemExit(7)", r"opake_kernel_patches raised SystemExit: 7 \(odd.py:5\)"),
}


@pytest.mark.parametrize(("source", "message"), PLANS.values(), ids=PLANS)
def test_a_senseless_plan_is_refused(source: str, message: str) -> None:
    model = tiny_model("llama")
    with isolated_registry(plugin(source)):
        with pytest.raises(FamilyInvalid, match=message):
            planning.plan("llama")
        with pytest.raises(FamilyInvalid, match=message):
            apply_model_patches(model)
    assert "_opake" not in vars(model)


ANSWERS = {
    "sites of something else": (
        "def sites(self, model): return [model]",
        "has a LlamaForCausalLM among its sites, no pair",
    ),
    "no sites": ("def sites(self, model): return 5", "raised TypeError in sites: 'int' object is not iterable"),
    "a reason as text": ("def fits(self, module): return 'no'", "answers fits with 'no', not None or a Skip"),
    "an error while asked": ("def fits(self, module): return 1 / 0", "raised ZeroDivisionError in fits"),
    "no undo": (
        "def apply(self, module): return None",
        "returned None from apply, no Undo, so norm cannot be restored",
    ),
}


@pytest.mark.parametrize(("method", "message"), ANSWERS.values(), ids=ANSWERS)
def test_a_record_that_answers_nonsense_is_named(method: str, message: str) -> None:
    model = tiny_model("llama")
    with isolated_registry(plugin(RECORD.format(method))):
        with pytest.raises(FamilyInvalid, match=rf"Own \(odd.py:\d+\) {message}"):
            apply_model_patches(model, rms_norm=True)
    # what was applied before it is taken back
    assert "_opake" not in vars(model)
    assert "forward" not in vars(model.model.layers[0].input_layernorm)


def test_an_error_while_a_record_is_applied_says_whose_it_is() -> None:
    model = tiny_model("llama")
    with isolated_registry(plugin(RECORD.format("def apply(self, module): raise RuntimeError('boom')"))):
        with pytest.raises(RuntimeError, match="boom") as caught:
            apply_model_patches(model, rms_norm=True)
    assert caught.value.__notes__ == ["while Own (odd.py:16) was applied to norm"]
    assert "_opake" not in vars(model)


def test_the_doctor_names_a_block_that_blocks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.BLOCK, "odd:llama, oddd:llama,LLama,ext_a:llama")
    with isolated_registry(plugin("raise SystemExit"), plugin("", "Ext.A", "extensions")):
        assert [finding.found for finding in doctor._blocks()] == ["LLama", "oddd:llama"]
        assert registry.claims(registry.EXTENSIONS) == registry.claims() == []


def test_a_module_that_ends_the_process_breaks_its_own_model_type() -> None:
    with isolated_registry(plugin("import sys\nsys.exit(3)")):
        with pytest.raises(FamilyImportError, match="does not import: SystemExit: 3; mend or uninstall it"):
            registry.load("llama")


WRAPPERS = {
    "forgets to return": ("    answers = yield", "returned None, not the list of lists of records"),
    "returns a number": ("    answers = yield\n    return 5", "returned 5, not the list of lists of records"),
    "never yields": ("    return []", "a wrapper asks the others with `answers = yield`"),
    "ends before it yields": (
        "    if hasattr(hookimpl, 'never'):\n        yield\n    return []",
        "ended without a yield",
    ),
    "yields twice": ("    answers = yield\n    yield answers", "it yielded a second time"),
}


@pytest.mark.parametrize(("body", "message"), WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapper_that_would_lose_records_is_refused(body: str, message: str) -> None:
    family = plugin(HOOK + "    yield RMSNorm(hf.LlamaRMSNorm)", "fam")
    with isolated_registry(family, plugin(WRAPPER + body, "ext", "extensions")):
        with pytest.raises(
            FamilyInvalid, match=f"extension of 'llama' .*the wrapper of opake_kernel_patches .*{message}"
        ):
            planning.plan("llama")


def test_a_wrapper_sees_what_the_family_raised() -> None:
    family = plugin(HOOK + "    yield hf.LlamaRMSNorm.nothing_of_the_kind", "fam")
    body = "    try:\n        answers = yield\n    except Exception:\n        return []\n    return answers"
    with isolated_registry(family, plugin(WRAPPER + body, "ext", "extensions")):
        assert planning.plan("llama")[1] == []
