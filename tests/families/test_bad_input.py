"""Inputs that a model would answer with a wrong number are refused: what, where, both values, before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, T5Config, T5ForConditionalGeneration

from opake.checking.tiny import tiny_batch, tiny_config, tiny_model
from opake.errors import InputError, OptionTypeError, PatchError, UnsupportedModel
from opake.functional import with_batch_dim
from opake.patches import apply_model_patches
from opake.testing.snapshot import differences, model_snapshot
from opake.testing.vmapped import vmap_gradients

B, T = 3, 12


@pytest.fixture(scope="module")
def model() -> Any:
    model = tiny_model("llama")
    apply_model_patches(model)
    return model


def rows(**changed: Any) -> dict[str, Any]:
    return {**tiny_batch(B, T), **changed}


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        pytest.param(
            {"attention_mask": torch.ones(B, T - 1)},
            InputError,
            r"LlamaForCausalLM: attention_mask has shape \(3, 11\) but input_ids has shape \(3, 12\)",
            id="mask-length",
        ),
        pytest.param({"attention_mask": torch.ones(B + 1, T)}, InputError, r"\(4, 12\) .* \(3, 12\)", id="mask-rows"),
        pytest.param({"attention_mask": torch.ones(T)}, InputError, r"\(12,\) .* takes 2 or 4 dim", id="mask-dim"),
        pytest.param(
            {"labels": torch.ones(B, T + 1).long()},
            InputError,
            r"labels has shape \(3, 13\) but input_ids has shape \(3, 12\)",
            id="labels-length",
        ),
        pytest.param(
            {"logits_to_keep": 5},
            InputError,
            r"labels has shape \(3, 12\) but input_ids has shape \(3, 12\) and logits_to_keep is 5; .*here \(3, 5\)",
            id="labels-kept",
        ),
        pytest.param({"labels": torch.ones(B).long()}, InputError, r"labels has shape \(3,\)", id="labels-dim"),
        pytest.param(
            {"labels": torch.ones(B, T)}, OptionTypeError, r"labels are torch.float32; .*torch.long", id="labels-float"
        ),
        pytest.param({"position_ids": torch.ones(2, T).long()}, InputError, r"position_ids has .*\(2, 12\)", id="pos"),
        pytest.param(
            {"labels": torch.ones(B, T, dtype=torch.bool)}, OptionTypeError, r"labels are torch.bool", id="labels-bool"
        ),
        pytest.param({"input_ids": torch.ones(B, T)}, OptionTypeError, r"input_ids are torch.float32", id="ids-float"),
        pytest.param(
            {name: torch.ones(B, 0).long() for name in ("input_ids", "labels", "attention_mask")},
            InputError,
            r"input_ids has shape \(3, 0\): a sequence needs at least one token",
            id="empty",
        ),
        pytest.param(
            {"input_ids": None, "inputs_embeds": torch.ones(B, 7, 32)},
            InputError,
            r"attention_mask has shape \(3, 12\) but inputs_embeds has shape \(3, 7, 32\)",
            id="embeds",
        ),
    ],
)
def test_a_bad_batch_is_refused_before_the_model_runs(
    model: Any, changed: dict[str, Any], error: type[Exception], text: str
) -> None:
    before = model_snapshot(model)
    with pytest.raises(error, match=text):
        model(**rows(**changed))
    assert list(differences(before, model_snapshot(model))) == []


@pytest.mark.parametrize("shape", ["T", "1xT"])
def test_a_bad_row_is_refused_inside_vmap(model: Any, shape: str) -> None:
    bad = rows(labels=torch.ones(B, T - 2).long())
    with pytest.raises(InputError, match=r"labels has shape \(1, 10\) but input_ids has shape \(1, 12\)"):
        vmap_gradients(model, bad, shape=shape)


def test_labels_of_the_tokens_kept_in_a_row(model: Any) -> None:
    kept = rows()["labels"][:, -5:]
    vmap_gradients(model, rows(labels=kept), logits_to_keep=5)
    with pytest.raises(InputError, match=r"labels has shape \(1, 5\) .* logits_to_keep is 4"):
        vmap_gradients(model, rows(labels=kept), logits_to_keep=4)


def test_a_row_whose_arguments_disagree_about_the_batch_is_refused(model: Any) -> None:
    one = {name: value[0] for name, value in rows().items()}
    with pytest.raises(InputError, match=r"labels has shape \(1, 1, 12\)"):
        model(**{**one, "labels": one["labels"][None]})


def test_an_argument_given_twice_or_too_many_is_refused(model: Any) -> None:
    given = rows()
    with pytest.raises(TypeError, match="several values for input_ids"):
        model(given["input_ids"], input_ids=given["input_ids"])
    with pytest.raises(TypeError, match="positional arguments"):
        model(*[given["input_ids"]] * 30)


def test_a_mask_of_the_cached_length_is_fine(model: Any) -> None:
    ids = rows()["input_ids"]
    with torch.no_grad():
        out = model(ids[:, :5], use_cache=True)
        keyword = next(name for name in ("cache", "past_key_values") if name in out)
        more = model(ids[:, 5:], attention_mask=torch.ones(B, T).long(), **{keyword: out[keyword]})
    assert more.logits.shape == (B, T - 5, 97)


def test_labels_of_whole_rows_are_the_models_own_business() -> None:
    config = tiny_config("llama", num_labels=4, problem_type="multi_label_classification")
    model = AutoModelForSequenceClassification.from_config(config)
    stock = AutoModelForSequenceClassification.from_config(config)
    stock.load_state_dict(model.state_dict())
    apply_model_patches(model)
    given = rows(labels=torch.rand(B, 4))
    torch.testing.assert_close(model(**given).loss, stock(**given).loss)


def test_labels_of_a_decoder_have_a_length_of_their_own() -> None:
    config = T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0, dropout_rate=0
    )
    model = T5ForConditionalGeneration(config)
    given = rows(labels=torch.ones(B, 5).long())
    want = model(**given).loss
    with pytest.warns(UserWarning, match="t5"):
        apply_model_patches(model)
    torch.testing.assert_close(model(**given).loss, want)


def test_a_model_without_weights_is_refused() -> None:
    with torch.device("meta"):
        model = type(tiny_model("llama"))(tiny_config("llama"))
    before = model_snapshot(model)
    with pytest.raises(UnsupportedModel, match=r"embed_tokens\.weight is on the meta device.*load the weights first"):
        apply_model_patches(model)
    assert list(differences(before, model_snapshot(model))) == []


def test_a_forward_that_is_wrapped_by_hand_is_refused() -> None:
    model = tiny_model("llama")
    model.forward = with_batch_dim(model.forward, batch_kwargs={"input_ids": 2, "labels": 2, "attention_mask": 2})
    before = model_snapshot(model)
    with pytest.raises(PatchError, match=r"LlamaForCausalLM\.forward is already wrapped by with_batch_dim.*del model"):
        apply_model_patches(model)
    assert list(differences(before, model_snapshot(model))) == []
    apply_model_patches(model, batchify=False)
    want = vmap_gradients(model, rows())
    del model.forward
    apply_model_patches(model)
    torch.testing.assert_close(vmap_gradients(model, rows()), want)


@pytest.mark.parametrize("thing", [None, "llama", torch.ones(3)])
def test_what_is_no_model_is_refused(thing: Any) -> None:
    with pytest.raises(UnsupportedModel, match="expected a model"):
        apply_model_patches(thing)
