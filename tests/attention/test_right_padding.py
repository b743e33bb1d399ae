"""Padding on the right without a mask: gradients of every family are those of the rows alone; who needs the mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import BertConfig, BertForMaskedLM

from opake import hf, registry
from opake.checking import answers
from opake.checking.tiny import tiny_config, tiny_model
from opake.collate import RightPaddingCollator, needs_mask
from opake.errors import InputError
from opake.patches import apply_model_patches
from opake.testing.oracle import relative_error
from opake.testing.vmapped import vmap_gradients

LENGTHS = (12, 7, 3)
# one of each kind; the others are many and take the same roads
QUICK = {"llama", "mistral", "gemma2", "gemma3_text", "gpt2"}
OURS = sorted({claim.name for claim in registry.listed() if claim.source == registry.OURS})
# no plugin, other roads: a hybrid with recurrent layers, short convolutions, Mamba
OTHERS = ["qwen3_next", "lfm2", "mamba2"]
FAMILIES = [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
    for name in [*OURS, *(name for name in OTHERS if name not in OURS)]
]


def rows() -> list[dict[str, list[int]]]:
    ids = torch.randint(3, 60, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row[:n].tolist()} for row, n in zip(ids, LENGTHS, strict=True)]


def gradients(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return vmap_gradients(model, batch)


@pytest.mark.filterwarnings("ignore:no family for", "ignore:There is a performance drop")
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_rows_alone(family: str) -> None:
    answer = answers.for_version(transformers.__version__).types.get(family)
    if answer is not None and not answer.proven:
        pytest.skip(f"this Transformers: {answer.reason}")
    try:
        model = tiny_model(tiny_config(family))
        # a router that draws its experts in training gives no two forwards alike
        model.train(not hasattr(model.config, "router_jitter_noise"))
    except InputError as error:
        pytest.skip(f"this Transformers: {error}")
    if any(map(hf.compresses_ahead, model.modules())):
        assert "later tokens" in (needs_mask(model) or "")
        pytest.skip(f"this Transformers: {needs_mask(model)}")
    # in float64 a difference is no rounding; eager masks know float32
    single = model.config._attn_implementation == "eager"
    limit = 2e-5 if single else 1e-6
    model = model if single else model.double()
    assert needs_mask(model) is None
    apply_model_patches(model)
    bare, masked = (RightPaddingCollator(pad_token_id=0, keep_mask=keep)(rows()) for keep in (False, True))
    assert "attention_mask" not in bare
    got = gradients(model, bare)
    assert relative_error(got, gradients(model, masked)) < limit
    for i, row in enumerate(rows()):
        alone = gradients(model, RightPaddingCollator()([row]))
        assert relative_error({name: g[i : i + 1] for name, g in got.items()}, alone) < limit


def test_attention_both_ways_needs_the_mask() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = BertConfig(vocab_size=61, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
    model = BertForMaskedLM(config).train()
    assert "looks both ways" in (needs_mask(model) or "")
    bare, masked = (RightPaddingCollator(pad_token_id=0, keep_mask=keep)(rows()) for keep in (False, True))
    with pytest.warns(UserWarning, match="no family for"):
        apply_model_patches(model)
    assert relative_error(gradients(model, bare), gradients(model, masked)) > 1e-3


def test_a_router_loss_needs_the_mask() -> None:
    model = tiny_model(tiny_config("mixtral", output_router_logits=True))
    assert "router loss" in (needs_mask(model) or "")
    bare, masked = (RightPaddingCollator(pad_token_id=0, keep_mask=keep)(rows()) for keep in (False, True))
    # the stock loss of a padded row is another one without its mask
    losses = [model(**{name: value[2:] for name, value in batch.items()}).loss.item() for batch in (bare, masked)]
    assert abs(losses[0] - losses[1]) > 1e-5
    model.config.output_router_logits = False
    assert needs_mask(model) is None
