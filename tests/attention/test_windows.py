"""Windows that no mask is made for, and eager attention with caps or sinks: who gets them, and that nothing changes.

Both are for CUDA; here the question which device it is is answered for them, and the twin stands for the kernel.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    sliding_window_causal_mask_function,
)

from opake.attention import eager, forward, windows
from opake.checking.tiny import tiny_config, tiny_model
from opake.checkpoint.step import inside_step
from opake.functional import per_example_grads
from opake.masks import builders, materialise
from opake.patches import apply_model_patches, patch_report, restore
from opake.testing.oracle import model_loop_gradients, relative_error
from opake.testing.vmapped import vmap_gradients
from opake_kernels.attention.math import attention_reference

WINDOW = 5


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every CPU counts as a device with kernels; the list gathers (mask is None, window) of each call."""
    calls: list[Any] = []

    def unmasked(device: Any, T: int, S: int) -> bool:
        return T == S and inside_step()

    def attend(q, k, v, mask, causal, scale, window, *rest):
        calls.append((mask is None, window))
        return stock(q, k, v, mask, causal, scale, window, *rest)

    def tiled(q, k, v, **options):
        calls.append((options["mask"] is None, options["window"]))
        return attention_reference(q, k, v, **options)

    stock = forward.attend
    monkeypatch.setattr(forward, "attend", attend)
    monkeypatch.setattr(materialise, "unmasked", unmasked)
    monkeypatch.setattr(windows, "unmasked", unmasked)
    monkeypatch.setattr(eager, "serves", eager.peculiar)
    monkeypatch.setattr(eager, "route", lambda *_: (eager.TRITON, None))
    monkeypatch.setattr(eager, "tiled_attention", tiled)
    return calls


def rows(padding: str, T: int = 12) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 60, (3, T), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if padding == "left":
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][1, :4] = 0
        batch["labels"][1, :4] = -100
    return batch


def reference(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return model_loop_gradients(model, **batch)


FAMILIES = ("mistral", "ministral", "gemma3_text", "cohere2", "exaone4", "olmo3", "phi3")
CASES = [(family, "vmap") for family in FAMILIES] + [("mistral", "batched"), ("ministral", "batched")]


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize(("family", "engine"), CASES)
def test_windows_without_a_mask(family: str, padding: str, engine: str, as_on_cuda) -> None:
    model = tiny_model(tiny_config(family, sliding_window=WINDOW), attention="sdpa")
    batch = rows(padding)
    if engine == "batched":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
    want = reference(model, batch)
    apply_model_patches(model, rms_norm=True)
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    got = per_example_grads(model, engine=engine)(params, **batch)
    assert relative_error(got, {name: want[name] for name in got}) < 5e-6
    seen = set(as_on_cuda)
    if padding == "none":
        assert any(masked and window for masked, window in seen), seen
        assert all(masked for masked, _ in seen), seen
    else:
        assert all(window is None for _, window in seen), seen


def test_outside_steps_windows_keep_their_mask_and_their_bits(as_on_cuda) -> None:
    model = tiny_model(tiny_config("mistral", sliding_window=WINDOW), attention="sdpa")
    batch = rows("none")
    before = model(**batch).logits
    apply_model_patches(model, kernels=False)
    assert torch.equal(model(**batch).logits, before)
    assert not as_on_cuda


def test_only_causal_windows_are_left_out() -> None:
    asked = windows.is_causal_window
    assert asked(sliding_window_causal_mask_function(WINDOW), WINDOW)
    assert asked(causal_mask_function, None)
    assert not asked(causal_mask_function, WINDOW)
    assert not asked(sliding_window_causal_mask_function(WINDOW), WINDOW + 1)
    assert not asked(lambda b, h, q, k: (q // WINDOW == k // WINDOW) & (k <= q), WINDOW)
    assert not asked(lambda b, h, q, k: abs(q - k) < WINDOW, WINDOW)
    assert not asked(and_masks(causal_mask_function, lambda b, h, q, k: k != 1), None)
    assert not asked(None, WINDOW)


def test_which_models_hand_their_window_on() -> None:
    assert windows.hands_on(tiny_model(tiny_config("mistral")), "sliding_window")
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_attention_heads=2))
    assert not windows.hands_on(llama, "sliding_window")
    assert windows.hands_on(tiny_model(tiny_config("gemma2"), attention="eager"), "softcap")
    # its compressors append keys, and to the mask what may be seen of them
    compressing = tiny_model(tiny_config("deepseek_v4"), attention="eager")
    assert windows.hands_on(compressing, "sliding_window")
    assert not windows.needs_no_mask(compressing)


# mixtures of experts are another page: unpatched they loop over rows
@pytest.mark.filterwarnings("ignore:no family for model_type", "ignore:There is a performance drop")
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "deepseek_v4"])
def test_eager_models_with_caps_and_sinks(family: str, padding: str, as_on_cuda) -> None:
    model = tiny_model(tiny_config(family, sliding_window=WINDOW), attention="eager")
    batch = rows(padding)
    want, before = reference(model, batch), model(**batch).logits
    forwards = {name: vars(m).get("forward") for name, m in model.named_modules()}
    report = apply_model_patches(model)
    (row,) = [row for row in report.find(flag="eager_attention") if "FoldedAttention" in str(row.record)]
    assert row.state == "applied"
    assert "triton" in row.reason
    assert relative_error(vmap_gradients(model, batch), want) < 5e-6
    seen = set(as_on_cuda)
    unmasked = padding == "none" and family != "deepseek_v4"
    assert seen == ({(True, WINDOW), (True, None)} if unmasked else {(False, None)})
    assert torch.equal(model(**batch).logits, before)
    assert len(set(as_on_cuda)) == len(seen)
    restore(model)
    assert {name: vars(m).get("forward") for name, m in model.named_modules()} == forwards


def test_eager_attention_that_the_kernel_does_not_take(as_on_cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "route", lambda *_: ("math", "a reason"))
    model = tiny_model(tiny_config("gemma2", sliding_window=WINDOW), attention="eager")
    want = reference(model, rows("none"))
    apply_model_patches(model)
    assert relative_error(vmap_gradients(model, rows("none")), want) < 5e-6
    report = patch_report(model)
    assert report is not None
    assert {fallback.reason for fallback in report.fallbacks} == {"attention by plain operations: a reason"}
    assert not as_on_cuda


def test_on_a_cpu_eager_models_stay_as_they_are() -> None:
    model = tiny_model(tiny_config("gemma2"), attention="eager")
    assert eager.peculiar(model)
    assert not eager.serves(model)
    assert "stock" in {row.state for row in apply_model_patches(model).find(flag="eager_attention")}
    assert builders.ImpliedMasks()["eager"] is not None


@pytest.mark.parametrize("padding", ["none", "left"])
def test_a_masked_step_of_the_batched_engine_takes_our_kernels_on_cuda(
    padding: str, as_on_cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "_masked_step", lambda q, mask, bias: mask is not None and inside_step())
    model = tiny_model(tiny_config("llama"), attention="sdpa")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    batch = rows(padding)
    want, before = reference(model, batch), model(**batch).logits
    apply_model_patches(model, rms_norm=True)
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    got = per_example_grads(model, engine="batched")(params, **batch)
    assert relative_error(got, {name: want[name] for name in got}) < 5e-6
    assert bool(as_on_cuda) == (padding == "left")
    as_on_cuda.clear()
    torch.testing.assert_close(model(**batch).logits, before)
    assert not as_on_cuda
