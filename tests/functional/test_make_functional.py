"""make_functional: a module as a function of its parameters."""

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from opake.errors import InputError
from opake.functional import make_functional


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mid = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.mid.bias.requires_grad_(False)

    def forward(self, x, *, scale=1.0):
        return self.head(torch.tanh(self.mid(self.embed(x)))) * scale


IDS = torch.arange(5)


def test_call_with_its_own_parameters_equals_the_module():
    model = Tied()
    fmodel, params = make_functional(model)
    assert torch.equal(fmodel(params, IDS, scale=2.0), model(IDS, scale=2.0))
    assert all(not p.requires_grad for p in params.values())
    assert params["mid.weight"].data_ptr() == model.mid.weight.data_ptr()


def test_tied_tensors_stand_once_and_are_replaced_everywhere():
    model = Tied()
    fmodel, params = make_functional(model)
    assert list(params) == ["embed.weight", "mid.weight", "mid.bias"]
    other = {name: p + 1 for name, p in params.items()}
    want = (torch.tanh(other["embed.weight"][IDS] @ other["mid.weight"].T + other["mid.bias"])) @ other[
        "embed.weight"
    ].T
    torch.testing.assert_close(fmodel(other, IDS), want)
    by_alias = {**other, "head.weight": other["embed.weight"]}
    del by_alias["embed.weight"]
    assert torch.equal(fmodel(by_alias, IDS), fmodel(other, IDS))
    assert model.head.weight is model.embed.weight


def test_partition_by_requires_grad():
    fmodel, trainable, frozen = make_functional(Tied(), partition_trainable=True)
    assert list(trainable) == ["embed.weight", "mid.weight"]
    assert list(frozen) == ["mid.bias"]
    assert torch.equal(fmodel({**trainable, **frozen}, IDS), fmodel(trainable, IDS))


def test_names_left_out_are_the_modules_own_and_frozen():
    model = Tied()
    fmodel, params = make_functional(model)
    leaf = params["mid.weight"].clone().requires_grad_()
    fmodel({"mid.weight": leaf}, IDS).sum().backward()
    assert leaf.grad is not None
    assert all(p.grad is None for p in model.parameters())
    with torch.no_grad():
        model.embed.weight.mul_(0)
    assert fmodel({"mid.weight": leaf}, IDS).abs().max() == 0


def test_under_vmap_grad():
    fmodel, params = make_functional(Tied())
    got = vmap(grad(lambda p, x: fmodel(p, x[None]).square().sum()), (None, 0))(params, IDS)
    assert got["embed.weight"].shape == (5, 7, 4)


def test_unknown_name_and_wrong_shape_are_refused():
    fmodel, params = make_functional(Tied())
    with pytest.raises(InputError, match=r"Tied has no parameter 'mid.wieght'; the nearest is 'mid.weight'"):
        fmodel({"mid.wieght": params["mid.weight"]}, IDS)
    with pytest.raises(InputError, match=r"'embed.weight' and 'head.weight' of Tied are one tied tensor"):
        fmodel({"embed.weight": torch.zeros(7, 4), "head.weight": torch.zeros(7, 4)}, IDS)
    with pytest.raises(InputError, match=r"'mid.bias' of Tied has shape \(4,\), params has \(3,\)"):
        fmodel({"mid.bias": torch.zeros(3)}, IDS)
