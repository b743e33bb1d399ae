"""Other tensors in a module's places: whatever is shared, and back to the very same objects."""

import pytest
import torch
from torch import nn

from opake.functional import make_functional, per_example_grads
from opake.swap import Places
from opake.testing.oracle import model_loop_gradients, relative_error


class Shared(nn.Module):
    """One submodule under two names, one tensor in two modules, a buffer, and an absent parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.tied = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.second = self.first
        self.tied.weight = self.first.weight
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        return {"loss": self.tied(torch.tanh(self.second(self.first(x)) * self.scale)).square().mean()}


def state(module):
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def test_each_tensor_once_and_each_place_filled():
    module = Shared()
    places = Places(module, module.first)
    assert len(places.tensors) == 3
    new = [torch.zeros_like(t) for t in places.tensors]
    with places.holding(new):
        assert module.scale is new[0]
        assert module.first.weight is module.second.weight is module.tied.weight is new[1]
        assert module.second.bias is new[2]
    assert module.tied.bias is None


@pytest.mark.parametrize("fails", [False, True])
def test_the_same_objects_are_back_afterwards(fails):
    module = Shared()
    before = state(module)
    places = Places(module)
    new = [torch.zeros_like(t) for t in places.tensors]
    try:
        with places.holding(new), places.holding([t + 1 for t in new]):
            assert module.first.bias.eq(1).all()
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    after = state(module)
    assert [name for name, _ in before] == [name for name, _ in after]
    assert all(old is new for (_, old), (_, new) in zip(before, after, strict=True))


def test_gradients_of_a_module_with_shared_submodules():
    module = Shared()
    before = state(module)
    params = make_functional(module)[1]
    x = torch.randn(4, 2, 3)
    got = per_example_grads(module)(params, x=x)
    assert all(old is new for (_, old), (_, new) in zip(before, state(module), strict=True))
    assert relative_error(got, model_loop_gradients(module, x=x)) < 5e-6
