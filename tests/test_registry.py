"""The registry: listing without importing, one family at a time, and messages that show both sides."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from opake import errors, hookspecs, registry
from opake.testing.isolated import Distribution, isolated_registry

RECORD = """
from opake.hookspecs import hookimpl

class Record:
    def __init__(self, name):
        self.name = name
    def __repr__(self):
        return f"Record({self.name})"
    def sites(self, model): ...
    def fits(self, module): ...
    def apply(self, module): ...
"""
FAMILY = "from fam_record import Record, hookimpl\n"
SHARED = Distribution("shared", modules={"fam_record": RECORD})
HF = SimpleNamespace(Norm="norm", Attention="attention")


def family(name: str, source: str, *model_types: str, version: str = "1.0") -> Distribution:
    module = "fam_ours" if name == "opake" else name.replace("-", "_")
    return Distribution(name, version, dict.fromkeys(model_types, module), modules={module: FAMILY + source})


ONE = """
@hookimpl
def opake_kernel_patches(hf):
    yield Record(hf.Norm)
    yield Record(hf.Attention)
"""


def plan(model_type: str, hooks=hookspecs.HOOKS):
    return registry.load(model_type).plan(HF, None, hooks)


def names(planned) -> list[str]:
    return [row.record.name for row in planned]


def test_listing_imports_no_plugin_and_loading_imports_one() -> None:
    with isolated_registry(SHARED, family("fam-a", ONE, "a"), family("fam-b", ONE, "b")):
        assert [(c.name, c.status, c.source, c.version, c.module) for c in registry.listed()] == [
            ("a", "ok", "fam-a", "1.0", "fam_a"),
            ("b", "ok", "fam-b", "1.0", "fam_b"),
        ]
        assert not {"fam_a", "fam_b"} & set(sys.modules)
        registry.load("b")
        assert "fam_b" in sys.modules
        assert "fam_a" not in sys.modules
    assert "fam_b" not in sys.modules


def test_registry_imports_nothing_heavy() -> None:
    code = (
        "import sys; from opake import registry; registry.listed(); registry.load('llama');"
        "print(sorted({'torch', 'transformers', 'triton', 'peft', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_plan_has_the_line_of_every_record() -> None:
    source = """
def helper(hf):
    yield Record("helped")

@hookimpl
def opake_kernel_patches(hf, config):
    yield Record("first")
    yield from helper(hf)
    if config is None:
        yield Record("last")

@hookimpl
def opake_lora_fusions(hf):
    return [Record("listed")]

@hookimpl
def opake_moe_patch():
    return Record("experts")
"""
    with isolated_registry(SHARED, family("fam-a", source, "a")) as site:
        planned = plan("a")
        text = (site / "fam_a.py").read_text().splitlines()
        lines = {row.record.name: int(row.source.removeprefix("fam_a.py:")) for row in planned}
        assert {row.path for row in planned} == {str(site / "fam_a.py")}
    for name in ("first", "helped", "last"):
        assert text[lines[name] - 1].strip() == f'yield Record("{name}")'
    assert "def opake_lora_fusions" in text[lines["listed"]]
    assert [(row.record.name, row.hook) for row in planned] == [
        ("first", "opake_kernel_patches"),
        ("helped", "opake_kernel_patches"),
        ("last", "opake_kernel_patches"),
        ("listed", "opake_lora_fusions"),
        ("experts", "opake_moe_patch"),
    ]


def test_source_is_relative_to_the_top_package() -> None:
    pack = Distribution(
        "pack", families={"a": "pack.models.a"}, modules={"pack.__init__": "", "pack.models.a": FAMILY + ONE}
    )
    with isolated_registry(SHARED, pack):
        assert [row.source for row in plan("a")] == ["pack/models/a.py:5", "pack/models/a.py:6"]


def test_only_the_hooks_named_are_asked() -> None:
    with isolated_registry(SHARED, family("fam-a", ONE, "a")):
        assert plan("a", ["opake_moe_patch"]) == []
        assert names(plan("a", ["opake_kernel_patches"])) == ["norm", "attention"]
        with pytest.raises(ValueError, match="no hook named opake_kernels; the hooks are opake_compat_patches"):
            plan("a", ["opake_kernels"])


def test_a_second_name_needs_no_second_module() -> None:
    with isolated_registry(SHARED, family("fam-a", ONE, "a", "alias")):
        assert names(plan("a")) == names(plan("alias")) == ["norm", "attention"]


def test_each_family_answers_for_itself_alone() -> None:
    other = "@hookimpl\ndef opake_kernel_patches():\n    return [Record('other')]\n"
    with isolated_registry(SHARED, family("fam-a", ONE, "a"), family("fam-b", other, "b")):
        assert names(plan("a")) == ["norm", "attention"]
        assert names(plan("b")) == ["other"]


def test_conflict_names_both_and_offers_to_block_the_third_party(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = family("opake", ONE, "llama", version="0.1"), family("a-first", ONE, "llama")
    monkeypatch.setenv(registry.BLOCK, "x")
    with isolated_registry(SHARED, ours, theirs):
        assert [c.status for c in registry.listed()] == ["conflict", "conflict"]
        with pytest.raises(errors.FamilyConflict) as caught:
            registry.load("llama")
        assert str(caught.value) == (
            "family 'llama' is claimed by opake 0.1 and a-first 1.0;"
            " uninstall all but one, or set OPAKE_BLOCK_FAMILIES=x,a-first:llama"
        )
        monkeypatch.setenv(registry.BLOCK, "A_First:llama")
        assert registry.load("llama").claim.source == "opake"
        assert [c.status for c in registry.listed()] == ["ok", "blocked"]


def test_a_changed_block_list_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(registry.BLOCK, raising=False)
    with isolated_registry(SHARED, family("fam-a", ONE, "a")):
        first = registry.load("a")
        assert registry.load("a") is first
        monkeypatch.setenv(registry.BLOCK, "b, a")
        with pytest.raises(
            errors.FamilyBlocked, match=r"family 'a' of fam-a 1\.0 is blocked by OPAKE_BLOCK_FAMILIES=b, a"
        ):
            registry.load("a")
        monkeypatch.delenv(registry.BLOCK)
        assert registry.load("a") is first


def test_unknown_family_offers_near_names() -> None:
    with isolated_registry(SHARED, family("fam-a", ONE, "llama")):
        with pytest.raises(errors.UnknownFamily, match=r"no family for model_type 'lama'; did you mean llama\?"):
            registry.load("lama")
        with pytest.raises(LookupError, match=r"no family for model_type 'xyz'$"):
            registry.load("xyz")


def test_a_broken_plugin_hurts_only_its_own_model_type() -> None:
    bad = Distribution("fam-bad", families={"bad": "fam_bad"}, modules={"fam_bad": "import does_not_exist\n"})
    with isolated_registry(SHARED, bad, family("fam-a", ONE, "a")):
        assert names(plan("a")) == ["norm", "attention"]
        with pytest.raises(errors.FamilyImportError) as caught:
            registry.load("bad")
    assert str(caught.value) == (
        "family 'bad' (fam_bad, from fam-bad 1.0) does not import: ModuleNotFoundError: No module named"
        " 'does_not_exist'; mend or uninstall it, or set OPAKE_BLOCK_FAMILIES=fam-bad:bad"
    )


@pytest.mark.parametrize(
    ("families", "modules"),
    [
        pytest.param({"bad": "nowhere_at_all"}, {}, id="no-module"),
        pytest.param({"bad": "pack.absent"}, {"pack.__init__": ""}, id="no-submodule"),
        pytest.param({"bad": "fam_bad"}, {"fam_bad": "def ("}, id="syntax"),
        pytest.param({"bad": "fam_bad"}, {"fam_bad": "SINCE = {'bad': 1 +}"}, id="since-syntax"),
        pytest.param({"bad": "fam_bad"}, {"fam_bad": "SINCE = compute()"}, id="since-not-a-literal"),
    ],
)
def test_what_cannot_import_is_listed_as_broken(families, modules) -> None:
    with isolated_registry(Distribution("fam-bad", families=families, modules=modules)):
        assert [c.status for c in registry.listed()] == ["broken"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param(
            "@hookimpl\ndef opake_kernel_patches(hf, modle):\n    return []\n", "'modle'", id="unknown-argument"
        ),
        pytest.param("@hookimpl\ndef opake_kernel_patchs(hf):\n    return []\n", "opake_kernel_patchs", id="typo"),
        pytest.param("X = 1\n", "implements no hook; the hooks are opake_compat_patches", id="no-hook"),
    ],
)
def test_a_plugin_that_breaks_the_contract_is_refused_at_load(source: str, message: str) -> None:
    with isolated_registry(SHARED, family("fam-a", source, "a")):
        with pytest.raises(errors.FamilyInvalid) as caught:
            registry.load("a")
    assert str(caught.value).startswith("family 'a' (fam_a, from fam-a 1.0)")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param("yield hf.Missing", "raised AttributeError: 'types.SimpleNamespace' object has no", id="raises"),
        pytest.param("yield Record", "returned the class Record (fam_a.py:4), not a record", id="class"),
        pytest.param("yield 'norm'", "returned 'norm' (fam_a.py:4), not a record of opake.records", id="string"),
        pytest.param("return Record(1)", "TypeError: returned Record(1), not an iterable of records", id="bare-record"),
        pytest.param("return 'ab'", "TypeError: returned 'ab', not an iterable of records", id="bare-string"),
    ],
)
def test_what_a_hook_may_not_do_is_reported_with_its_line(body: str, message: str) -> None:
    source = f"@hookimpl\ndef opake_kernel_patches(hf):\n    {body}\n"
    with isolated_registry(SHARED, family("fam-a", source, "a")):
        with pytest.raises(errors.FamilyInvalid) as caught:
            plan("a")
    assert str(caught.value).startswith("family 'a' (fam_a, from fam-a 1.0): opake_kernel_patches ")
    assert message in str(caught.value)
    assert "(fam_a.py:" in str(caught.value)


def test_moe_hook_must_not_be_a_generator() -> None:
    source = "@hookimpl\ndef opake_moe_patch(hf):\n    yield Record(1)\n"
    with isolated_registry(SHARED, family("fam-a", source, "a")):
        with pytest.raises(errors.FamilyInvalid, match="opake_moe_patch raised TypeError: yields; this hook returns"):
            plan("a")


def extension(name: str, source: str, model_type: str) -> Distribution:
    module = name.replace("-", "_")
    return Distribution(name, extensions={model_type: module}, modules={module: FAMILY + source})


ADD = "@hookimpl\ndef opake_kernel_patches():\n    yield Record({!r})\n"


def test_extensions_are_asked_after_the_family_in_the_order_of_their_distributions() -> None:
    extra = [extension("ext-b", ADD.format("b"), "a"), extension("ext-a", ADD.format("a"), "a")]
    with isolated_registry(SHARED, *extra, family("zzz", ONE, "a", "other")):
        loaded = registry.load("a")
        assert [c.source for c in loaded.extensions] == ["ext-a", "ext-b"]
        assert names(plan("a")) == ["norm", "attention", "a", "b"]
        assert names(plan("other")) == ["norm", "attention"]


def test_an_extension_can_be_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    with isolated_registry(SHARED, family("fam", ONE, "a"), extension("ext", ADD.format("x"), "a")):
        monkeypatch.setenv(registry.BLOCK, "ext:a")
        assert names(plan("a")) == ["norm", "attention"]


def test_a_broken_extension_is_named_with_the_way_out() -> None:
    with isolated_registry(SHARED, family("fam", ONE, "a"), extension("ext", "import does_not_exist\n", "a")):
        with pytest.raises(errors.FamilyImportError, match=r"extension of 'a' \(ext, from ext 1\.0\) does not import"):
            registry.load("a")


WRAPPER = """
@hookimpl(wrapper=True)
def opake_kernel_patches():
    answers = yield
    assert all(isinstance(answer, list) for answer in answers), answers
    return [[record for record in answer if record.name != "norm"] for answer in answers] + [[Record("new")]]
"""


def test_a_wrapper_drops_and_adds_and_keeps_the_lines_of_the_rest() -> None:
    with isolated_registry(SHARED, family("fam", ONE, "a"), extension("ext", WRAPPER, "a")):
        planned = plan("a")
    assert [(row.record.name, row.source) for row in planned] == [("attention", "fam.py:6"), ("new", "ext.py:3")]


def test_a_wrapper_of_the_old_style_is_refused() -> None:
    old = WRAPPER.replace("wrapper=True", "hookwrapper=True")
    with isolated_registry(SHARED, family("fam", ONE, "a"), extension("ext", old, "a")):
        with pytest.raises(errors.FamilyInvalid, match=r"says hookwrapper=True; write hookimpl\(wrapper=True\)"):
            registry.load("a")


def test_moe_the_first_answer_counts_and_a_wrapper_may_replace_it() -> None:
    moe = "@hookimpl\ndef opake_moe_patch():\n    return Record({!r})\n"
    none = "@hookimpl\ndef opake_moe_patch():\n    return None\n"
    wrapper = "@hookimpl(wrapper=True)\ndef opake_moe_patch():\n    yield\n    return Record('wrapped')\n"
    with isolated_registry(SHARED, family("fam", moe.format("fam"), "a"), extension("ext", moe.format("ext"), "a")):
        assert names(plan("a")) == ["fam"]
    with isolated_registry(SHARED, family("fam", none, "a"), extension("ext", moe.format("ext"), "a")):
        assert names(plan("a")) == ["ext"]
    with isolated_registry(SHARED, family("fam", moe.format("fam"), "a"), extension("ext", wrapper, "a")):
        assert [(row.record.name, row.source) for row in plan("a")] == [("wrapped", "ext.py:2")]


def test_a_family_younger_than_the_installed_transformers_says_so() -> None:
    since = "SINCE = {'new9': '5.99', 'llama': '5.0'}\n"
    with isolated_registry(SHARED, family("fam", since + ONE, "new9", "llama", "plain")):
        assert {c.name: c.status for c in registry.listed()} == {
            "new9": "needs transformers >= 5.99",
            "llama": "ok",
            "plain": "ok",
        }


def test_isolated_registry_leaves_no_trace() -> None:
    before = registry.listed(), list(sys.path), registry._search_path
    with isolated_registry(llama="opake_families.llama"):
        assert [(c.name, c.source) for c in registry.listed()] == [("llama", "isolated")]
    assert (registry.listed(), list(sys.path), registry._search_path) == before


def test_many_threads_load_the_same_family() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with isolated_registry(SHARED, family("fam", ONE, "a")), ThreadPoolExecutor(8) as pool:
        assert all(names(rows) == ["norm", "attention"] for rows in pool.map(lambda _: plan("a"), range(32)))


def test_hooks_are_all_prefixed_and_take_the_two_arguments() -> None:
    import inspect

    assert len(hookspecs.HOOKS) == 4
    for hook in hookspecs.HOOKS:
        specification = getattr(hookspecs, hook)
        assert hook.startswith("opake_")
        assert list(inspect.signature(specification).parameters) == ["hf", "config"]
        assert "@hookimpl" in specification.__doc__
        assert f"def {hook}(" in specification.__doc__
