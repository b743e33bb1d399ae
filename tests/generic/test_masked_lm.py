"""BERT and RoBERTa as masked language models: bidirectional attention, so that the mask is no matter of convention."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForMaskedLM

from opake.checking.tiny import tiny_batch, tiny_config
from opake.patches import apply_model_patches, patch_report, restore
from opake.testing.oracle import model_loop_gradients, relative_error
from opake.testing.snapshot import differences, model_snapshot
from opake.testing.vmapped import vmap_gradients

LIMIT = 5e-6
MODELS = ("bert", "roberta")
pytestmark = pytest.mark.filterwarnings("ignore::opake.errors.GenericFamilyWarning")


def build(model_type: str, attention: str) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForMaskedLM.from_config(tiny_config(model_type), attn_implementation=attention)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.15)
    return model.train()


def masked_batch(padding: str) -> dict[str, torch.Tensor]:
    """Every third token hidden behind token 3 and predicted; the other labels are ignored."""
    rows = tiny_batch(padding="none" if padding == "ones" else padding)
    if padding == "ones":
        rows["attention_mask"] = torch.ones_like(rows["input_ids"])
    # position 6 is real in every row, whatever the padding
    hidden = torch.zeros_like(rows["input_ids"], dtype=torch.bool)
    hidden[:, ::3] = True
    hidden &= rows["labels"] != -100
    rows["labels"] = rows["labels"].masked_fill(~hidden, -100)
    rows["input_ids"] = rows["input_ids"].masked_fill(hidden, 3)
    return rows


@pytest.mark.parametrize("padding", ["right", "left", "none", "ones"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", MODELS)
def test_per_example_gradients(model_type: str, attention: str, padding: str) -> None:
    model, stock, rows = build(model_type, attention), build(model_type, attention), masked_batch(padding)
    apply_model_patches(model)
    want = model_loop_gradients(stock, **rows)
    for shape in ("T", "1xT"):
        assert relative_error(vmap_gradients(model, rows, shape=shape), want) <= LIMIT


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", MODELS)
def test_the_mask_reaches_attention(model_type: str, attention: str) -> None:
    """A padded row has the gradients of the row alone: a mask that both sides ignore would be seen."""
    model, stock, rows = build(model_type, attention), build(model_type, attention), masked_batch("right")
    apply_model_patches(model)
    got = vmap_gradients(model, rows)
    for row, real in enumerate(rows["attention_mask"].bool()):
        want = model_loop_gradients(stock, **{name: value[row, real][None] for name, value in rows.items()})
        assert relative_error({name: grad[row : row + 1] for name, grad in got.items()}, want) <= LIMIT


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", MODELS)
def test_a_row_without_masked_tokens(model_type: str, attention: str) -> None:
    """Its loss is 0 and its gradients are 0, where stock gives no number; its neighbours do not notice."""
    model, rows = build(model_type, attention), masked_batch("right")
    apply_model_patches(model)
    want = vmap_gradients(model, rows)
    rows["labels"][1] = -100
    got = vmap_gradients(model, rows)
    assert all(not grad[1].any() for grad in got.values())
    assert all(torch.equal(got[name][[0, 2]], want[name][[0, 2]]) for name in want)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", MODELS)
def test_restore(model_type: str, attention: str) -> None:
    model = build(model_type, attention)
    before = model_snapshot(model)
    apply_model_patches(model)
    vmap_gradients(model, masked_batch("right"))
    second = apply_model_patches(model)
    assert not second.find(state="applied")
    restore(model)
    assert list(differences(before, model_snapshot(model))) == []
    assert patch_report(model) is None


@pytest.mark.parametrize("model_type", MODELS)
def test_plain_batches_are_as_before(model_type: str) -> None:
    model, stock, rows = build(model_type, "eager"), build(model_type, "eager"), masked_batch("right")
    apply_model_patches(model)
    assert torch.equal(model(**rows).loss, stock(**rows).loss)
    assert torch.equal(model(**rows).logits, stock(**rows).logits)
