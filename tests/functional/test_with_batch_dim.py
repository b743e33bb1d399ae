"""with_batch_dim: both forms of the guide, nested outputs, and refusals that name both values."""

import inspect
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from transformers.modeling_outputs import CausalLMOutput

from opake.errors import InputError, OptionTypeError
from opake.functional import make_functional, with_batch_dim

V, H, T, B = 11, 6, 5, 3


class Model(nn.Module):
    """Wants (B, T) and refuses anything else."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(V, H), nn.Linear(H, V)

    def forward(self, input_ids=None, attention_mask=None, labels=None, inputs_embeds=None, **kwargs):
        """Docstring of the model."""
        h = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        assert h.dim() == 3
        if attention_mask is not None:
            assert attention_mask.dim() == 2
            h = h * attention_mask[..., None]
        logits = self.head(h)
        loss = None if labels is None else nn.functional.cross_entropy(logits.transpose(1, 2), labels)
        return CausalLMOutput(loss=loss, logits=logits, hidden_states=(h, logits.sum(-1)))


KWARGS = {"input_ids": 2, "attention_mask": 2, "labels": 2, "inputs_embeds": 3}


@pytest.fixture
def ids():
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(1))


def test_function_form_under_vmap_grad(ids):
    model = Model()
    fmodel, params = make_functional(model)

    def loss_fn(params, input_ids, labels):
        return fmodel(params, input_ids=input_ids, labels=labels).loss

    wrapped = with_batch_dim(loss_fn, batch_argnums=(1, 2))
    got = vmap(grad(wrapped), (None, 0, 0))(params, ids, ids)
    for i in range(B):
        model.zero_grad()
        model(input_ids=ids[i : i + 1], labels=ids[i : i + 1]).loss.backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(got[name][i], p.grad)


def test_forward_form_under_vmap_grad(ids):
    model, plain = Model(), Model()
    model.forward = with_batch_dim(model.forward, batch_kwargs=KWARGS, min_ndim=2)
    params = {name: p.detach() for name, p in plain.named_parameters()}

    def loss(params, i, y):
        out = functional_call(model, params, (), {"input_ids": i, "labels": y})
        assert out.logits.shape == (T, V)
        return out.loss

    def batched(params, i, y):
        return functional_call(plain, params, (), {"input_ids": i[None], "labels": y[None]}).loss

    got, want = (vmap(grad(fn), (None, 0, 0))(params, ids, ids) for fn in (loss, batched))
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_outputs_lose_the_dimension_in_every_container(ids):
    Pair = namedtuple("Pair", "a b")

    def fn(x):
        assert x.dim() == 2
        return {"t": x, "pair": Pair(x, "text"), "list": [x, (x, None)], "scalar": x.sum(), "od": OrderedDict(x=x)}

    out = with_batch_dim(fn, batch_argnums=0)(ids[0])
    assert isinstance(out["pair"], Pair)
    assert isinstance(out["od"], OrderedDict)
    assert out["pair"].b == "text"
    tensors = [out["t"], out["pair"].a, out["list"][0], out["list"][1][0], out["od"]["x"]]
    assert all(torch.equal(t, ids[0]) for t in tensors)
    assert out["list"][1][1] is None
    assert out["scalar"].dim() == 0


def test_model_output_keeps_its_class_and_fields(ids):
    out = with_batch_dim(Model().forward, batch_kwargs=KWARGS)(input_ids=ids[0], labels=ids[0])
    assert type(out) is CausalLMOutput
    assert out.loss.dim() == 0
    assert out.logits.shape == (T, V)
    assert [h.shape for h in out.hidden_states] == [(T, H), (T,)]
    assert out.attentions is None


def test_batched_input_passes_through_untouched(ids):
    sentinel = {"a": torch.zeros(1, 4)}
    seen = []

    def fn(x, y=None):
        seen.append((x, y))
        return sentinel

    wrapped = with_batch_dim(fn, batch_kwargs={"x": 2, "y": 2})
    assert wrapped(ids, y=ids[:, :1]) is sentinel
    assert seen[0][0] is ids
    # a batch of one is a batch: it keeps its dimension
    out = with_batch_dim(Model().forward, batch_kwargs=KWARGS)(input_ids=ids[:1])
    assert out.logits.shape == (1, T, V)


def test_thresholds_of_the_forward_form(ids):
    wrapped = with_batch_dim(Model().forward, batch_kwargs=KWARGS, min_ndim=2)
    assert wrapped(inputs_embeds=torch.randn(T, H)).logits.shape == (T, V)
    assert wrapped(inputs_embeds=torch.randn(2, T, H)).logits.shape == (2, T, V)
    assert wrapped(ids[0]).logits.shape == (T, V)
    assert wrapped(ids[0], torch.ones(T)).logits.shape == (T, V)


def test_a_shared_argument_with_a_batch_of_one_is_fine(ids):
    wrapped = with_batch_dim(Model().forward, batch_kwargs=KWARGS)
    assert wrapped(input_ids=ids[0], attention_mask=torch.ones(1, T)).logits.shape == (T, V)


def test_function_form_with_min_ndim_is_a_no_op_on_batches(ids):
    wrapped = with_batch_dim(lambda p, x: x * p, batch_argnums=[1], min_ndim=2)
    assert wrapped(2, ids).shape == (B, T)
    assert wrapped(2, ids[0]).shape == (T,)


def test_names_alone_take_min_ndim(ids):
    wrapped = with_batch_dim(Model().forward, batch_kwargs=["input_ids", "labels"], min_ndim=2)
    assert wrapped(input_ids=ids[0], labels=ids[0]).logits.shape == (T, V)


def test_nested_argument(ids):
    def fn(batch):
        return batch["x"] + batch["more"][0]

    wrapped = with_batch_dim(fn, batch_argnums=0)
    assert torch.equal(wrapped({"x": ids[0], "more": (ids[1],)}), ids[0] + ids[1])


def test_argument_by_position_may_come_by_name_or_be_absent(ids):
    def fn(params, x, y=None):
        assert x.dim() == 2
        assert y is None or y.dim() == 2
        return x.sum() * params

    wrapped = with_batch_dim(fn, batch_argnums=(1, 2))
    assert wrapped(1, x=ids[0], y=ids[0]) == wrapped(1, ids[0]) == wrapped(1, ids[0], None)


def test_open_positional_arguments(ids):
    wrapped = with_batch_dim(lambda *args: args[1], batch_argnums=1)
    assert torch.equal(wrapped(0, ids[0]), ids[0])
    assert with_batch_dim(torch.numel, batch_argnums=0)(ids[0]) == T


def test_name_docstring_and_signature_are_kept():
    forward = Model().forward
    wrapped = with_batch_dim(forward, batch_kwargs=KWARGS)
    assert wrapped.__name__ == "forward"
    assert wrapped.__doc__ == "Docstring of the model."
    assert wrapped.__wrapped__ == forward
    assert inspect.signature(wrapped) == inspect.signature(forward)


def fn_of_two(params, x):
    return x


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({}, OptionTypeError, "batch_argnums or batch_kwargs"),
        ({"batch_argnums": (2,)}, InputError, "batch_argnums has 2, but fn_of_two takes 2"),
        ({"batch_argnums": (-1,)}, InputError, "batch_argnums has -1"),
        ({"batch_argnums": ("x",)}, OptionTypeError, r"positions, got 'x' \(str\)"),
        ({"batch_argnums": True}, OptionTypeError, "positions, got True"),
        ({"batch_kwargs": {"z": 2}}, InputError, "batch_kwargs has 'z', but fn_of_two takes params, x"),
        ({"batch_kwargs": {"x": 0}}, OptionTypeError, r"batch_kwargs\['x'\].*positive int; got 0"),
        ({"batch_kwargs": ["x"]}, OptionTypeError, r"batch_kwargs\['x'\].*got None"),
        ({"batch_kwargs": "x"}, OptionTypeError, "got the string 'x'"),
    ],
)
def test_wrong_use_is_refused_when_wrapping(options, error, text):
    with pytest.raises(error, match=text):
        with_batch_dim(fn_of_two, **options)


def test_an_argument_without_tensors_is_refused():
    with pytest.raises(OptionTypeError, match="fn_of_two: x gets a batch dimension, but int 3 has no tensor"):
        with_batch_dim(fn_of_two, batch_argnums=1)({}, 3)


def test_a_single_row_beside_a_batch_is_refused(ids):
    wrapped = with_batch_dim(Model().forward, batch_kwargs=KWARGS)
    with pytest.raises(InputError, match="labels is a single row, but input_ids is a batch of 3"):
        wrapped(input_ids=ids, labels=ids[0])
