"""Families beyond the documented ones, each tried by name: gradients in many situations, rows, generation, restore.

Those that a plugin claims by now run with it, the others generically. The cells that a run takes rotate, as in the
conformance suite; the others are slow.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from opake.checking.judge import judged, loop_grads
from opake.checking.tiny import tiny_batch, tiny_model
from opake.patches import apply_model_patches, restore
from opake.testing.cells import Cell, grid, part_name
from opake.testing.snapshot import differences, model_snapshot
from opake.testing.switch import checkpointing
from opake.testing.vmapped import vmap_gradients

from .recorded import needs

FAMILIES = (
    *("qwen3_5_text", "gemma4_text", "llama4_text", "starcoder2", "stablelm", "phi", "falcon", "gpt_neox", "bloom"),
    *("opt", "glm", "glm4_moe", "ernie4_5", "seed_oss", "nemotron", "lfm2", "olmoe", "granitemoe", "deepseek_v3"),
)
# the implementation that Transformers chooses, and the one that every model has
CELLS = [cell for cell in grid(("default", "eager")) if cell.dtype == "fp32"]
AT_A_TIME = 6
pytestmark = [
    pytest.mark.filterwarnings("ignore::opake.errors.GenericFamilyWarning"),
    # stock experts and routers run under vmap row by row: right and slow
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]


@functools.cache
def build(family: str, attention: str, which: str) -> PreTrainedModel:
    """The stock or the patched model of a family, built once."""
    needs(family)
    model = tiny_model(family, attention=None if attention == "default" else attention)
    if which == "patched":
        apply_model_patches(model)
    return model


def batch(padding: str) -> dict[str, torch.Tensor]:
    rows = tiny_batch(padding="none" if padding == "ones" else padding)
    if padding == "ones":
        rows["attention_mask"] = torch.ones_like(rows["input_ids"])
    return rows


def gradients(model: PreTrainedModel, rows: dict[str, torch.Tensor], shape: str = "T") -> dict[str, torch.Tensor]:
    # some models draw a number for layer dropout even where its probability is zero
    return vmap_gradients(model, rows, shape=shape, randomness="different")


def cells() -> list[Any]:
    params = []
    for family in FAMILIES:
        part = random.Random(f"{family} {part_name()}").sample(CELLS, AT_A_TIME)
        for cell in CELLS:
            marks = () if cell in part or part_name() == "all" else pytest.mark.slow
            params.append(pytest.param(family, cell, id=f"{family}-{cell}", marks=marks))
    return params


@pytest.mark.parametrize(("family", "cell"), cells())
def test_per_example_gradients(family: str, cell: Cell) -> None:
    stock, model = (build(family, cell.attention, which) for which in ("stock", "patched"))
    for each in (stock, model):
        each.train(cell.mode == "train")
    rows = batch(cell.padding)
    with checkpointing(model, cell.checkpointing == "ckpt"):
        got = gradients(model, rows, cell.shape)
    error, right, note = judged(got, loop_grads(stock, rows), stock, rows)
    assert right, f"relative error {error:.1e}, {note}"


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_independent(family: str) -> None:
    """Bit for bit, whatever tokens, labels and padding the neighbours have."""
    model, rows = build(family, "default", "patched").train(), batch("ones")
    want = gradients(model, rows)
    others = {name: value.clone() for name, value in rows.items()}
    others["input_ids"][1:] = rows["input_ids"][1:].flip(1)
    others["attention_mask"][1:, 7:] = 0
    others["labels"][1:] = -100
    got = gradients(model, others)
    assert [name for name in want if not torch.equal(got[name][0], want[name][0])] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_is_as_before(family: str) -> None:
    stock, model = (build(family, "default", which).eval() for which in ("stock", "patched"))
    rows = batch("left")
    asked = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    inputs = {name: rows[name] for name in ("input_ids", "attention_mask")}
    assert torch.equal(model.generate(**inputs, **asked), stock.generate(**inputs, **asked))


@pytest.mark.parametrize("family", FAMILIES)
def test_restore_is_identical(family: str) -> None:
    needs(family)
    model = tiny_model(family)
    before = model_snapshot(model)
    first = apply_model_patches(model)
    second = apply_model_patches(model)
    assert first.find(state="applied")
    assert not second.find(state="applied")
    assert {(r.record, r.site) for r in second.find(state="already")} >= {
        (r.record, r.site) for r in first.find(state="applied")
    }
    gradients(model, batch("right"))
    restore(model)
    assert list(differences(before, model_snapshot(model))) == []


def test_every_family_is_a_causal_language_model_here() -> None:
    assert [name for name in FAMILIES if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES] == []
