"""`logits_to_keep` beside labels for the tokens that are kept: whatever stock takes, in every way to a loss."""

from __future__ import annotations

import copy

import pytest
import torch

from opake.checking.tiny import tiny_batch, tiny_model
from opake.errors import InputError
from opake.functional import per_example_grads
from opake.patches import apply_model_patches
from opake.testing.oracle import batch_gradients, model_loop_gradients, relative_error

B, T = 3, 12
BATCH = tiny_batch(B, T)
LABELS = BATCH["labels"]
CHOSEN = torch.tensor([1, 4, 5])
OF_ROWS = torch.tensor([[1, 4], [0, 2], [6, 7]])
MASK = torch.zeros(T, dtype=torch.bool)
MASK[CHOSEN] = True
KEPT = {
    "all": (0, LABELS),
    "none said": (None, LABELS),
    "the last": (5, LABELS[:, -5:]),
    "more than there are": (T + 1, LABELS),
    "positions": (CHOSEN, LABELS[:, CHOSEN]),
    "positions of each row": (OF_ROWS, LABELS.gather(1, OF_ROWS)),
    "a mask": (MASK, LABELS[:, CHOSEN]),
    "a mask of each row": (MASK.expand(B, T), LABELS[:, CHOSEN].reshape(1, -1)),
    "labels shifted already": (5, LABELS),
}


def _batch(case):
    keep, labels = KEPT[case]
    more = {"shift_labels": LABELS[:, :5].contiguous()} if case == "labels shifted already" else {}
    return {**BATCH, "logits_to_keep": keep, "labels": labels, **more}


@pytest.mark.parametrize("case", KEPT)
@pytest.mark.parametrize("options", [{}, {"kernels": True}, {"loss_only": True}], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_ordinary_call(family, options, case):
    stock = tiny_model(family)
    model = copy.deepcopy(stock)
    options = dict(options)
    more = {"loss_only": options.pop("loss_only")} if "loss_only" in options else {}
    apply_model_patches(model, **options)
    batch = _batch(case)
    torch.testing.assert_close(model(**batch, **more).loss, stock(**batch).loss)
    assert relative_error(batch_gradients(model, **batch, **more), batch_gradients(stock, **batch)) < 1e-5


@pytest.mark.parametrize("case", ["all", "the last", "positions", "positions of each row"])
@pytest.mark.parametrize("engine", ["vmap", "batched"])
def test_the_gradients_of_rows(engine, case):
    stock = tiny_model("llama")
    model = copy.deepcopy(stock)
    apply_model_patches(model, kernels=True)
    batch = _batch(case)
    shared = case == "positions"
    # the oracle cuts every tensor into rows
    alone = {**batch, "logits_to_keep": CHOSEN.expand(B, -1)} if shared else batch
    for one in (model, stock):
        one.requires_grad_(False)
        one.lm_head.requires_grad_()
    params = {"lm_head.weight": model.lm_head.weight}
    in_dims = {"logits_to_keep": None} if shared else None
    got = per_example_grads(model, engine=engine, in_dims=in_dims)(params, **batch)
    assert relative_error(got, model_loop_gradients(stock, **alone)) < 1e-5


@pytest.mark.parametrize("keep", [5, CHOSEN, OF_ROWS])
@pytest.mark.parametrize("length", [1, 6, T])
def test_labels_of_another_length_are_refused(keep, length):
    model = tiny_model("llama")
    apply_model_patches(model)
    size = "is 5" if keep is not CHOSEN and keep is not OF_ROWS else f"has shape {tuple(keep.shape)}"
    kept = 5 if size == "is 5" else keep.shape[-1]
    text = f"labels has shape (3, {length}) but input_ids has shape (3, 12) and logits_to_keep {size}; "
    for more in ({}, {"loss_only": True}):
        with pytest.raises(InputError) as found:
            model(BATCH["input_ids"], labels=LABELS[:, :length], logits_to_keep=keep, **more)
        assert str(found.value).startswith("LlamaForCausalLM: " + text)
        assert f"here (3, {kept})" in str(found.value)
