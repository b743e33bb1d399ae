"""Inside a capture no mask is made where none was supplied, whichever Transformers is installed."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from opake.attention.names import NAMES, Windowed
from opake.masks import materialise
from opake.masks.materialise import mask_function
from opake.patches import apply_model_patches, apply_runtime_patches, restore, restore_runtime

B, T, V = 2, 6, 19


@pytest.fixture
def capturing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def seen(monkeypatch, window):
    """The masks that attention got in one forward without a mask."""
    config = MistralConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=window,
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(config)
    apply_runtime_patches()
    apply_model_patches(model)
    masks = []
    real = materialise.sdpa_mask
    monkeypatch.setattr(materialise, "sdpa_mask", lambda *a, **k: masks.append(real(*a, **k)) or masks[-1])
    model(input_ids=torch.randint(0, V, (B, T)))
    restore(model)
    restore_runtime()
    return masks


def test_causal_attention_takes_none(capturing, monkeypatch):
    assert [m for m in seen(monkeypatch, None) if m is not None] == []


def test_a_window_is_still_made(capturing, monkeypatch):
    (mask,) = seen(monkeypatch, 3)
    assert mask.shape[-2:] == (T, T)
    assert not mask[0, 0, 5, 1]


@pytest.mark.parametrize("handed_on", [True, False])
def test_only_a_window_that_attention_applies_is_left_out(capturing, monkeypatch, handed_on):
    monkeypatch.setattr(materialise, "unmasked", lambda *_: True)
    monkeypatch.setattr(materialise, "sdpa_mask", lambda *_, **asked: ("made", asked["local_size"]))
    config = SimpleNamespace(_attn_implementation=(Windowed if handed_on else str)(NAMES[True, True]))
    sizes = {"batch_size": 1, "q_length": T, "kv_length": T, "config": config, "local_size": 3}
    made = mask_function(**sizes, mask_function=sliding_window_causal_mask_function(3))
    assert made == (None if handed_on else ("made", 3))
    # one that no window of the last three keys describes
    assert mask_function(**sizes, mask_function=causal_mask_function) == ("made", 3)


def test_a_supplied_mask_is_still_made(capturing):
    given = torch.tensor([[1, 1, 0]], dtype=torch.bool)
    sizes = {"batch_size": 1, "q_length": 3, "kv_length": 3}
    made = mask_function(**sizes, attention_mask=given, mask_function=lambda b, h, q, k: k <= q)
    assert made is not None
    assert not made[..., 2].any()
