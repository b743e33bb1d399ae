"""Deferred logits against the logits themselves: what is served without computing them, and everything else."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from opake.lm_head.call import LossOnly
from opake.lm_head.deferred import DeferredLogits
from opake.lm_head.head import Head
from opake_kernels.cross_entropy import opake_cross_entropy_loss

B, T, H, V = 2, 5, 8, 13


class Pair:
    """The same logits deferred and real, with a list of the reasons for which they were computed."""

    def __init__(self, wide=False):
        torch.manual_seed(0)
        self.hidden = torch.randn(B, T, H, requires_grad=True)
        self.weight = torch.randn(B, V, H) if wide else torch.randn(V, H)
        self.labels = torch.randint(0, V, (B, T))
        self.labels[0, 1] = -100
        self.reasons = []
        head = Head(self.weight, None, self.compute, self.reasons.append, True)
        self.deferred = DeferredLogits(head, self.hidden, torch.float32)

    def compute(self):
        return self.hidden @ (self.weight.t() if self.weight.dim() == 2 else self.weight.transpose(1, 2))


@pytest.fixture
def pair():
    return Pair()


CHAINS = {
    "as it is": lambda z: z,
    "scaled": lambda z: z * 0.5,
    "divided": lambda z: z / 3.0,
    "scaled from the left": lambda z: 2 * z,
    "capped": lambda z: torch.tanh(z / 4.0) * 4.0,
    "scaled and capped": lambda z: (z * 0.5 / 4.0).tanh() * 4.0,
    "functions": lambda z: torch.mul(torch.tanh(torch.div(z, 2.0)), 2.0),
    "cast": lambda z: z.float().to(torch.float32).to(dtype=torch.float32).to("cpu").to(z.device),
    "laid out": lambda z: z.contiguous(),
    "methods": lambda z: z.mul(0.5).div(2.0),
    "added and taken away": lambda z: z[None].squeeze(0),
}
SHAPES = {
    "view": lambda z, y: (z.view(-1, V), y.view(-1)),
    "view of a size": lambda z, y: (z.view(torch.Size((B * T, V))), y.view(-1)),
    "reshape": lambda z, y: (torch.reshape(z, (-1, z.shape[-1])), y.reshape(-1)),
    "flatten": lambda z, y: (z.flatten(0, 1), y.flatten()),
    "shifted": lambda z, y: (z[..., :-1, :].contiguous().view(-1, V), y[..., 1:].reshape(-1)),
    "first tokens": lambda z, y: (z[:, :3].flatten(0, -2), y[:, :3].flatten()),
    "chosen tokens": lambda z, y: (z[y != -100], y[y != -100]),
    "positions": lambda z, y: (z[:, torch.tensor([0, 4])].view(-1, V), y[:, [0, 4]].reshape(-1)),
    "one row": lambda z, y: (z[1], y[1]),
    "one token": lambda z, y: (z[1, 2], y[1, 2]),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chain", CHAINS)
def test_served_without_logits(chain, shape, pair):
    losses = []
    for logits in (pair.deferred, pair.compute()):
        flat, labels = SHAPES[shape](CHAINS[chain](logits), pair.labels)
        assert flat.shape == (*labels.shape, V)
        assert flat.dim() == labels.dim() + 1 == flat.ndim
        loss = F.cross_entropy(flat, labels)
        losses.append((loss, torch.autograd.grad(loss, pair.hidden)[0]))
    torch.testing.assert_close(*losses)
    assert not pair.reasons


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"ignore_index": 3}])
@pytest.mark.parametrize("wide", [False, True])
def test_options_of_the_loss(wide, options, reduction):
    pair = Pair(wide)
    if "ignore_index" in options:
        pair.labels[0, 1] = 3
    for loss in (F.cross_entropy, opake_cross_entropy_loss):
        got = loss(pair.deferred.view(-1, V), pair.labels.view(-1), reduction=reduction, **options)
        want = loss(pair.compute().view(-1, V), pair.labels.view(-1), reduction=reduction, **options)
        torch.testing.assert_close(got, want)
    # this one takes any leading dimensions
    got = opake_cross_entropy_loss(pair.deferred, pair.labels, reduction=reduction, **options)
    torch.testing.assert_close(got.flatten(), want.flatten())
    assert not pair.reasons


COMPUTED = {
    "a term added": lambda z: z + 1.0,
    "subtracted from": lambda z: 1.0 - z,
    "a tensor as scale": lambda z: z * torch.linspace(0.5, 1.5, V),
    "a negative scale": lambda z: z * -1.0,
    "capped twice": lambda z: z.tanh().tanh(),
    "one column": lambda z: z[..., -1],
    "some columns": lambda z: z[..., :4],
    "columns in all dimensions": lambda z: z[:, :, :4],
    "a new last dimension": lambda z: z[..., None],
    "transposed": lambda z: z.transpose(1, 2),
    "softmax": lambda z: z.softmax(-1),
    "log_softmax": lambda z: F.log_softmax(z, dim=-1),
    "argmax": lambda z: z.argmax(-1),
    "stacked": lambda z: torch.stack([z, z]),
    "in float64": lambda z: z.double(),
    "another shape": lambda z: z.view(B, -1),
    "halves": lambda z: z.chunk(2, -1),
    "iterated": lambda z: [row.sum() for row in z],
    "compared": lambda z: z > 0,
    "class weights": lambda z: F.cross_entropy(z.view(-1, V), torch.zeros(B * T).long(), weight=torch.ones(V) / 2),
    "probabilities": lambda z: F.cross_entropy(z.view(-1, V), torch.full((B * T, V), 1.0 / V)),
    "classes in the second dimension": lambda z: F.cross_entropy(z, torch.zeros(B, V).long()),
    "scaled once more": lambda z: opake_cross_entropy_loss(z, torch.zeros(B, T).long(), logit_scale=0.5),
}


BY_TWOS = torch.tensor([0, 2])
# every handled function, in the forms that torch gives it besides those above: served or computed, never refused
FORMS = {
    "float": [lambda z: z.float(), lambda z: z.float(memory_format=torch.preserve_format)],
    "to": [
        lambda z: z.to(torch.ones(1)),
        lambda z: z.to(torch.ones(1, dtype=torch.float64)),
        lambda z: z.to(tensor=torch.ones(1)),
        lambda z: z.to("cpu", torch.float64),
        lambda z: z.to(device="cpu", dtype=torch.float32, non_blocking=False, copy=True),
        lambda z: z.to(torch.float32, copy=True),
        lambda z: z.to(torch.float64, memory_format=torch.contiguous_format),
    ],
    "contiguous": [lambda z: z.contiguous(memory_format=torch.contiguous_format)],
    "squeeze": [
        lambda z: z[:1].squeeze(),
        lambda z: z[:1].squeeze(dim=0),
        lambda z: z[:1].squeeze((0, 1)),
        lambda z: z.squeeze(-1),
        lambda z: torch.squeeze(z[:1]),
        lambda z: torch.squeeze(z[:1], -3),
        lambda z: torch.squeeze(z[:1], dim=(0,)),
        lambda z: torch.squeeze(input=z[:1], dim=0),
    ],
    "view": [
        lambda z: z.view(size=(-1, V)),
        lambda z: z.view(torch.int32),
        lambda z: z.view(dtype=torch.int32),
        lambda z: z.view([B * T, V]),
        lambda z: z.view(B, T * V),
        lambda z: z.view(-1),
        lambda z: z.view(B, -1, 1, V),
        lambda z: z.view(B, T, -1),
    ],
    "reshape": [
        lambda z: z.reshape(shape=(-1, V)),
        lambda z: z[:, :-1].reshape(B, -1),
        lambda z: torch.reshape(z, shape=(-1, V)),
        lambda z: torch.reshape(input=z, shape=(-1, V)),
        lambda z: torch.reshape(z, [V, -1]),
        lambda z: torch.reshape(z, (-1,)),
    ],
    "flatten": [
        lambda z: z.flatten(),
        lambda z: z.flatten(end_dim=-2),
        lambda z: z.flatten(1),
        lambda z: torch.flatten(z, end_dim=1),
        lambda z: torch.flatten(z, start_dim=0, end_dim=-1),
        lambda z: torch.flatten(input=z, end_dim=1),
    ],
    "tanh": [
        lambda z: torch.tanh(z, out=torch.empty(B, T, V)),
        lambda z: torch.tanh(input=z),
        lambda z: z.tanh_(),
    ],
    "mul": [
        lambda z: z.mul(other=2.0),
        lambda z: z.mul(other=torch.tensor(2.0)),
        lambda z: z.mul(True),
        lambda z: z * z,
        lambda z: torch.mul(z, other=2.0),
        lambda z: torch.mul(z, 2, out=torch.empty(B, T, V)),
        lambda z: torch.mul(input=z, other=2.0),
        lambda z: torch.mul(torch.tensor(2.0), z),
        lambda z: torch.tensor(2.0) * z,
        lambda z: torch.multiply(z, 2.0),
        lambda z: z.mul_(2.0),
    ],
    "div": [
        lambda z: z.div(other=2.0),
        lambda z: z.div(2, rounding_mode="floor"),
        lambda z: z.div(2, rounding_mode=None),
        lambda z: torch.div(z, 2, rounding_mode="floor"),
        lambda z: torch.div(z, 2, rounding_mode="trunc", out=torch.empty(B, T, V)),
        lambda z: torch.div(z, other=2.0),
        lambda z: torch.div(input=z, other=2.0),
        lambda z: torch.true_divide(z, 2.0),
        lambda z: 2.0 / z,
        lambda z: z // 2,
        lambda z: 2 // z,
        lambda z: z % 2,
        lambda z: 2.0 % z,
        lambda z: +z,
    ],
    "index": [
        lambda z: z[()],
        lambda z: z[[0, 1]],
        lambda z: z[0, 1, 2, ...],
        lambda z: z[..., 0, :, :],
        lambda z: z[0, ..., 1:],
        lambda z: z[:, :, :, None],
        lambda z: z[torch.ones(B, T, V, dtype=torch.bool)],
        lambda z: z[torch.ones(B, T, V, dtype=torch.bool), ...],
        lambda z: z[:, BY_TWOS, :],
        lambda z: z[..., BY_TWOS],
        lambda z: z[0, BY_TWOS, BY_TWOS],
        lambda z: z[range(2)],
        lambda z: z[True],
    ],
    "cross_entropy": [
        lambda z: F.cross_entropy(input=z.view(-1, V), target=ONES),
        lambda z: F.cross_entropy(z.view(-1, V), ONES, None, None, 1, None, "sum", 0.1),
        lambda z: F.cross_entropy(z.view(-1, V), ONES, torch.ones(V), reduction="none"),
        lambda z: opake_cross_entropy_loss(logits=z, labels=ONES.view(B, T)),
        lambda z: opake_cross_entropy_loss(z, ONES.view(B, T), logit_softcapping=None),
        lambda z: opake_cross_entropy_loss(z, ONES.view(B, T), logit_softcapping=5.0, logit_scale=0.5),
    ],
}
ONES = torch.ones(B * T, dtype=torch.long)


@pytest.mark.parametrize(("name", "form"), [(name, i) for name, forms in FORMS.items() for i in range(len(forms))])
@pytest.mark.parametrize("computed", [False, True])
def test_every_form_of_a_call(name, form, computed, pair):
    pair.hidden = pair.hidden.detach()
    pair.deferred.hidden = pair.hidden
    if computed:
        pair.deferred.value("asked for")
    got, want = FORMS[name][form](pair.deferred), FORMS[name][form](pair.compute())
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    torch.testing.assert_close(got.value("compared") if isinstance(got, DeferredLogits) else got, want)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda z: z.squeeze(3),
        lambda z: z.flatten(0, 3),
        lambda z: z.view(7, V),
        lambda z: z.view(),
        lambda z: z.mul(),
        lambda z: torch.div(z, 2, rounding_mode="up"),
        lambda z: z[:, :, :, :],
        lambda z: z.to(nonsense=1),
        bool,
    ],
)
def test_what_torch_refuses_is_refused(wrong, pair):
    with pytest.raises(Exception) as want:  # noqa: PT011
        wrong(pair.compute())
    with pytest.raises(want.type):
        wrong(pair.deferred)


@pytest.mark.parametrize("name", COMPUTED)
def test_everything_else_computes_them(name, pair):
    got, want = tree_leaves(COMPUTED[name](pair.deferred)), tree_leaves(COMPUTED[name](pair.compute()))
    assert all(isinstance(g, torch.Tensor) for g in got)
    torch.testing.assert_close(got, want)
    assert len(pair.reasons) == 1


def test_changes_in_place_reach_what_shares_the_memory(pair):
    def run(z):
        flat = z.view(-1, V)
        scaled = z * 0.5
        z[..., -1] = -5.0
        flat[0] += 1.0
        return F.cross_entropy(flat, pair.labels.view(-1)), F.cross_entropy(scaled.view(-1, V), pair.labels.view(-1))

    torch.testing.assert_close(run(pair.deferred), run(pair.compute()))
    assert len(pair.reasons) == 1


def test_an_unknown_attribute_is_an_attribute_error(pair):
    assert not hasattr(pair.deferred, "no_such_thing")
    assert not hasattr(pair.deferred, "__array__")
    assert not pair.reasons
    assert pair.deferred.requires_grad
    assert pair.deferred.is_floating_point()
    assert len(pair.deferred) == B
    assert pair.deferred.numel() == B * T * V
    assert pair.deferred.size(-1) == V
    assert "computed=False" in repr(pair.deferred)
    assert not pair.reasons


ROWS = {
    "one at a time": lambda z, y: torch.stack([F.cross_entropy(z[i], y[i], reduction="sum") for i in range(B)]).sum(),
    "the other order": lambda z, y: F.cross_entropy(z[[1, 0]].view(-1, V), y[[1, 0]].view(-1)),
    "chosen tokens": lambda z, y: F.cross_entropy(z[y != -100], y[y != -100]),
    "without the first token of all": lambda z, y: F.cross_entropy(z.view(-1, V)[2:], y.view(-1)[2:]),
    "the last tokens left out": lambda z, y: F.cross_entropy(z.view(-1, V)[..., :-2, :], y.view(-1)[:-2]),
    "without the first token of each": lambda z, y: F.cross_entropy(z[..., 1:, :].reshape(-1, V), y[:, 1:].reshape(-1)),
    "one token of each": lambda z, y: F.cross_entropy(z[:, 2], y[:, 2]),
    "tokens of each": lambda z, y: F.cross_entropy(z[:, BY_TWOS].view(-1, V), y[:, BY_TWOS].reshape(-1)),
    "two indices": lambda z, y: F.cross_entropy(z[BY_TWOS % 2, BY_TWOS], y[BY_TWOS % 2, BY_TWOS]),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("of", ["weight", "bias", "both"])
def test_weights_of_each_example_stay_with_their_example(name, of):
    pair = Pair(wide=True)
    weight, bias = torch.randn(B, V, H), torch.randn(B, V)
    given = [weight[0] if of == "bias" else weight, bias[0] if of == "weight" else bias]
    linear = torch.nn.Linear(H, V)
    call = LossOnly(linear, True, by_row=True)
    linear.weight, linear.bias = map(torch.nn.Parameter, given)
    deferred = call.defer(lambda linear, x: F.linear(x, linear.weight, linear.bias), linear, pair.hidden)
    wide = linear.weight if linear.weight.dim() == 3 else linear.weight.expand(B, V, H)
    own = linear.bias if linear.bias.dim() == 2 else linear.bias.expand(B, V)
    real = pair.hidden @ wide.transpose(1, 2) + own[:, None]
    asked = [pair.hidden, linear.weight, linear.bias]
    got, want = ROWS[name](deferred, pair.labels), ROWS[name](real, pair.labels)
    torch.testing.assert_close(got, want)
    for g, w in zip(torch.autograd.grad(got, asked), torch.autograd.grad(want, asked), strict=True):
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", [lambda z: z.view(-1, V), lambda z: z[0], lambda z: z[0, 0], lambda z: z[0, :0]])
def test_no_label_at_all(shape, smoothing, reduction, pair):
    flat, real = shape(pair.deferred), shape(pair.compute())
    labels = torch.full(flat.shape[:-1], -100)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    got, want = F.cross_entropy(flat, labels, **options), F.cross_entropy(real, labels, **options)
    torch.testing.assert_close(got, want, equal_nan=True)
    grads = [torch.autograd.grad(loss.sum(), pair.hidden)[0] for loss in (got, want)]
    torch.testing.assert_close(*grads)
    # the op's own mean is 0, and so is the loss of a row
    assert not opake_cross_entropy_loss(flat, labels).any()
    pair.deferred.head.by_row = True
    assert not F.cross_entropy(flat, labels, **options).any()
    assert not pair.reasons


def test_labels_of_another_length_are_refused_as_by_torch(pair):
    with pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(pair.deferred.view(-1, V), pair.labels.view(-1)[1:])
