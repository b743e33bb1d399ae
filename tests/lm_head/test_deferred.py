"""Deferred logits against the logits themselves: what is served without computing them, and everything else."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

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


def test_labels_of_another_length_are_refused_as_by_torch(pair):
    with pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(pair.deferred.view(-1, V), pair.labels.view(-1)[1:])
