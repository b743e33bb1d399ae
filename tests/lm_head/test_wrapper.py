"""`loss_only=True` beside every other keyword, under copies, transforms and rematerialisation; and its undo."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

from opake.checking.tiny import tiny_batch, tiny_model
from opake.functional import per_example_grads
from opake.lm_head import deferred_logits, supports_loss_only
from opake.lm_head.deferred import DeferredLogits
from opake.patches import apply_model_patches, patch_report, restore
from opake.testing.live import LiveBytes


@pytest.fixture
def model():
    return tiny_model("llama")


@pytest.fixture
def patched(model):
    apply_model_patches(model)
    return model


BATCH = tiny_batch()


def _reasons(model):
    return [f.reason for f in patch_report(model).fallbacks]


def test_an_ordinary_call_is_the_ordinary_forward(model):
    before = model(**BATCH)
    apply_model_patches(model)
    for more in ({}, {"loss_only": False}, {"loss_only": None}):
        out = model(**BATCH, **more)
        assert torch.equal(out.logits, before.logits)
        torch.testing.assert_close(out.loss, before.loss)


@pytest.mark.parametrize("count", [17, torch.tensor(17)])
def test_num_items_in_batch_is_honoured_outside_transforms(patched, count):
    want = patched(**BATCH, num_items_in_batch=count).loss
    torch.testing.assert_close(patched(**BATCH, num_items_in_batch=count, loss_only=True).loss, want)
    assert want != patched(**BATCH).loss


def test_shift_labels(patched):
    shifted = nn.functional.pad(BATCH["labels"], (0, 1), value=-100)[:, 1:].roll(1, 0)
    want = patched(**BATCH, shift_labels=shifted).loss
    out = patched(**BATCH, shift_labels=shifted, loss_only=True)
    torch.testing.assert_close(out.loss, want)
    assert out.logits is None
    assert want != patched(**BATCH).loss


def test_hidden_states_and_attentions_are_returned():
    model = tiny_model("llama", attention="eager")
    apply_model_patches(model, eager_attention=False)
    more = {"output_hidden_states": True, "output_attentions": True}
    want, out = model(**BATCH, **more), model(**BATCH, **more, loss_only=True)
    assert out.logits is None
    assert [h.shape for h in out.hidden_states] == [h.shape for h in want.hidden_states]
    assert torch.equal(out.hidden_states[-1], want.hidden_states[-1])
    assert torch.equal(out.attentions[0], want.attentions[0])


def test_a_tuple_has_no_logits(patched):
    want = patched(**BATCH, return_dict=False)
    out = patched(**BATCH, return_dict=False, loss_only=True)
    torch.testing.assert_close(out[0], want[0])
    assert len(out) == len(want) - 1
    assert all(not isinstance(o, DeferredLogits) for o in out)


def test_positional_arguments(patched):
    out = patched(BATCH["input_ids"], BATCH["attention_mask"], labels=BATCH["labels"], loss_only=True)
    assert out.logits is None
    torch.testing.assert_close(out.loss, patched(**BATCH).loss)


def test_inputs_embeds_and_a_cache(patched):
    embeds = patched.get_input_embeddings()(BATCH["input_ids"])
    rest = {name: BATCH[name] for name in ("attention_mask", "labels")}
    out = patched(inputs_embeds=embeds, use_cache=True, **rest, loss_only=True)
    assert out.logits is None
    torch.testing.assert_close(out.loss, patched(**BATCH).loss)
    assert out.to_tuple()[-1] is not None


def test_without_labels_the_logits_come_back_and_a_reason(patched):
    rest = {name: BATCH[name] for name in ("input_ids", "attention_mask")}
    out = patched(**rest, loss_only=True)
    assert torch.equal(out.logits, patched(**rest).logits)
    assert out.loss is None
    assert _reasons(patched) == ["loss_only: logits were computed, the call has no labels and so no loss"]
    # rows as vmap hands them out
    row = {name: value[0] for name, value in rest.items()}
    assert patched(**row, loss_only=True).logits.shape == patched(**row).logits.shape


def test_a_row_without_a_batch_dimension(patched):
    row = {name: value[1] for name, value in BATCH.items()}
    out = patched(**row, loss_only=True)
    assert out.logits is None
    torch.testing.assert_close(out.loss, patched(**row).loss)


@pytest.mark.parametrize("options", [{}, {"cross_entropy": True}])
@pytest.mark.parametrize("more", [{}, {"num_items_in_batch": 7}, {"label_smoothing": 0.1}], ids=str)
def test_all_labels_ignored(model, options, more):
    """As the ordinary call has it: not a number with torch's loss, 0 with the fused one."""
    apply_model_patches(model, **options)
    ignored = {**BATCH, "labels": torch.full_like(BATCH["labels"], -100), **more}
    want, got = model(**ignored).loss, model(**ignored, loss_only=True).loss
    torch.testing.assert_close(got, want, equal_nan=True)
    assert got.isnan() == (not options and not more)
    got.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("engine", ["vmap", "batched"])
@pytest.mark.parametrize("loss", ["stock", "own"])
def test_a_row_without_labels(model, loss, engine):
    """Its gradient is 0 in both engines, whatever the loss of an ordinary call would be, and others keep theirs."""
    if loss == "own":
        model.loss_function = _own_loss
    apply_model_patches(model, rms_norm=True)
    model.requires_grad_(False)
    model.model.norm.requires_grad_()
    labels = BATCH["labels"].clone()
    labels[1] = -100
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    got = per_example_grads(model, engine=engine)(params, **{**BATCH, "labels": labels})["model.norm.weight"]
    want = per_example_grads(model, engine="vmap")(params, **BATCH)["model.norm.weight"]
    assert not got[1].any()
    torch.testing.assert_close(got[[0, 2]], want[[0, 2]])


def _own_loss(logits, labels, vocab_size, **kwargs):
    return nn.functional.cross_entropy(logits.view(-1, vocab_size), labels.view(-1))


_own_loss.row_losses = lambda logits, labels: torch.stack(
    [nn.functional.cross_entropy(row, y) for row, y in zip(logits, labels, strict=True)]
)


def test_swapped_weights_are_the_ones_used(patched):
    twice = {name: p.detach() * 1.5 for name, p in patched.named_parameters()}
    want = functional_call(patched, twice, (), BATCH).loss
    torch.testing.assert_close(functional_call(patched, twice, (), {**BATCH, "loss_only": True}).loss, want)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(patched, reentrant):
    params = list(patched.parameters())
    want = torch.autograd.grad(patched(**BATCH).loss, params)
    enable = getattr(patched, "activation_checkpointing_enable", patched.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    patched(**BATCH, loss_only=True).loss.backward()
    for p, w in zip(params, want, strict=True):
        torch.testing.assert_close(p.grad, w, rtol=1e-4, atol=1e-6)


def test_the_whole_model_rematerialised(patched):
    def loss(embeds):
        return patched(inputs_embeds=embeds, labels=BATCH["labels"], loss_only=True).loss

    embeds = patched.get_input_embeddings()(BATCH["input_ids"]).detach().requires_grad_()
    (want,) = torch.autograd.grad(loss(embeds), embeds)
    value = torch.utils.checkpoint.checkpoint(loss, embeds, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(value, embeds)[0], want)


def test_autocast(patched):
    with torch.autocast("cpu", torch.bfloat16):
        want, out = patched(**BATCH).loss, patched(**BATCH, loss_only=True)
    assert out.logits is None
    assert out.loss.dtype == torch.float32
    torch.testing.assert_close(out.loss, want, rtol=1e-2, atol=0)


def test_a_copy_has_a_head_of_its_own(patched):
    other = copy.deepcopy(patched)
    with torch.no_grad():
        other.lm_head.weight.mul_(2.0)
    torch.testing.assert_close(other(**BATCH, loss_only=True).loss, other(**BATCH).loss)
    torch.testing.assert_close(patched(**BATCH, loss_only=True).loss, patched(**BATCH).loss)
    restore(patched)
    assert not supports_loss_only(patched)
    assert supports_loss_only(other)
    assert other(**BATCH, loss_only=True).logits is None


def test_restore_leaves_nothing(model):
    before = [dict(vars(model)), dict(vars(model.lm_head))]
    apply_model_patches(model)
    assert supports_loss_only(model)
    assert "forward" in vars(model.lm_head)
    restore(model)
    assert [dict(vars(model)), dict(vars(model.lm_head))] == before
    assert not supports_loss_only(model)


def test_switched_off(model):
    report = apply_model_patches(model, fused_linear_cross_entropy=False)
    assert report.find(flag="fused_linear_cross_entropy", state="off")
    assert not supports_loss_only(model)
    assert "forward" not in vars(model.lm_head)


def test_generation_and_saving_are_untouched(model, tmp_path):
    model.eval()
    ids = BATCH["input_ids"][:1, :4]
    kept = set(model.state_dict())
    want = model.generate(ids, max_new_tokens=4, do_sample=False)
    apply_model_patches(model)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), want)
    assert set(model.state_dict()) == kept
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_an_ordinary_call_inside_a_loss_only_one_has_logits(patched):
    """A hook that runs another patched model, a teacher, say."""
    teacher = tiny_model("llama", seed=1)
    apply_model_patches(teacher)
    seen = []
    handle = patched.model.register_forward_hook(lambda *_: seen.append(teacher(**BATCH).logits))
    assert patched(**BATCH, loss_only=True).logits is None
    handle.remove()
    assert isinstance(seen[0], torch.Tensor)


def test_no_logits_are_alive():
    """The largest tensor of a step is far from tokens x vocabulary."""
    model = tiny_model("llama", vocab_size=4096)
    apply_model_patches(model, chunked_linear_cross_entropy=64)
    batch = tiny_batch(rows=8, tokens=60)
    model.lm_head.requires_grad_(False)
    model.get_input_embeddings().requires_grad_(False)
    with LiveBytes() as alone:
        model(**batch, loss_only=True).loss.backward()
    with LiveBytes() as full:
        model(**batch).loss.backward()
    logits = 8 * 60 * 4096 * 4
    assert full.peak > 2 * logits
    assert alone.peak < logits / 2


def test_deferred_logits_for_the_losses_of_rows(patched):
    rest = {name: BATCH[name] for name in ("input_ids", "attention_mask")}
    logits = deferred_logits(patched, **rest)
    assert isinstance(logits, DeferredLogits)
    assert logits.shape == patched(**rest).logits.shape
    flat, labels = logits[:, :-1].reshape(-1, logits.shape[-1]).float(), BATCH["labels"][:, 1:].reshape(-1)
    got = nn.functional.cross_entropy(flat, labels, reduction="none")
    want = nn.functional.cross_entropy(patched(**rest).logits[:, :-1].flatten(0, 1), labels, reduction="none")
    torch.testing.assert_close(got, want)
    assert not _reasons(patched)
    restore(patched)
    assert isinstance(deferred_logits(patched, **rest), torch.Tensor)
