"""Gradient checkpointing of a frozen model: adapters get their gradients, with nothing else required of the user."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from opake.checking.tiny import tiny_model
from opake.functional import clipped_grad, per_example_grads
from opake.lora import apply_lora, remove_lora
from opake.testing.oracle import model_loop_gradients, relative_error

from .subjects import BATCH, checkpointing, double_model, gradients, patch, randomised, trainable


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma3_text", "mixtral"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_gradients_are_those_without_checkpointing(model_type: str, reentrant: bool, first: bool) -> None:
    model = double_model(model_type)
    targets = ["q_proj", "gate"] if model_type == "mixtral" else "all-linear"
    if first:
        checkpointing(model, use_reentrant=reentrant)
    randomised(apply_lora(model, targets))
    if not first:
        checkpointing(model, use_reentrant=reentrant)
    # a reentrant checkpoint knows backward() alone
    model(**BATCH).loss.backward()
    got = {name: p.grad for name, p in trainable(model).items()}
    (getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable)()
    assert relative_error(got, gradients(model)[1]) < 1e-9


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
def test_without_the_hook_they_would_be_lost() -> None:
    model = randomised(apply_lora(double_model("llama")))
    checkpointing(model, use_reentrant=True)
    model.get_input_embeddings()._forward_hooks.clear()
    assert not model(**BATCH).loss.requires_grad


def test_the_embedding_is_left_alone_where_nothing_checkpoints() -> None:
    model = apply_lora(double_model("llama"))
    embedding = model.get_input_embeddings()
    assert not embedding(BATCH["input_ids"]).requires_grad
    # not by the model's own method, which may put a hook of its own there
    model.model.layers[0].gradient_checkpointing = True
    out = embedding(BATCH["input_ids"])
    assert out.requires_grad
    assert torch.equal(out, torch.nn.functional.embedding(BATCH["input_ids"], embedding.weight))
    with torch.no_grad():
        assert not embedding(BATCH["input_ids"]).requires_grad
    twin = copy.deepcopy(model)
    assert twin.get_input_embeddings()(BATCH["input_ids"]).requires_grad
    remove_lora(model)
    assert not embedding._forward_hooks
    embedding.requires_grad_(False)
    assert not embedding(BATCH["input_ids"]).requires_grad
    assert twin.get_input_embeddings()(BATCH["input_ids"]).requires_grad


def test_several_calls_place_one_hook() -> None:
    model = apply_lora(apply_lora(tiny_model("llama"), "q_proj"), "v_proj")
    assert len(model.get_input_embeddings()._forward_hooks) == 1


@pytest.mark.parametrize("order", [("patch", "checkpoint"), ("checkpoint", "patch")])
def test_per_example_gradients(order: tuple[str, ...]) -> None:
    model = randomised(apply_lora(double_model("llama")))
    want = model_loop_gradients(model, **BATCH)
    steps: dict[str, Any] = {"patch": patch, "checkpoint": checkpointing}
    for step in order:
        steps[step](model)
    for engine in ("vmap", "batched"):
        assert relative_error(per_example_grads(model, engine=engine)(trainable(model), **BATCH), want) < 1e-9
    assert clipped_grad(model, clip_norm=1.0)(trainable(model), **BATCH).engine == "batched"
