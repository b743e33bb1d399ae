"""What every wrapper does: whose adapter may be absent from a state dict, copies while it is off, further arguments."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from opake.lora import LinearAdapter, LoRALinear, apply_lora, disable_adapter

from .subjects import randomised


def two() -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()


def by_hand() -> Any:
    model = two()
    for i in range(2):
        model[i] = LoRALinear(model[i], LinearAdapter(model[i], dim=2))
    return model


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("model", [apply_lora(two(), dim=2), by_hand()], ids=["apply_lora", "by hand"])
@pytest.mark.parametrize("lost", [0, 1])
def test_one_lost_adapter_is_missing(model: Any, lost: int) -> None:
    state = {k: v for k, v in model.state_dict().items() if not k.startswith(f"{lost}.adapter.")}
    with pytest.raises(RuntimeError, match=rf'Missing key\(s\).*"{lost}\.adapter\.linear_in\.weight"'):
        model.load_state_dict(state)
    found = model.load_state_dict(state, strict=False)
    assert found.missing_keys == [f"{lost}.adapter.linear_in.weight", f"{lost}.adapter.linear_out.weight"]
    assert found.unexpected_keys == []
    # the next load starts afresh
    assert model.load_state_dict(two().state_dict()).missing_keys == []
    assert model.load_state_dict(model.state_dict()).missing_keys == []


def test_a_checkpoint_with_fewer_adapters_is_not_a_strict_one() -> None:
    fewer = apply_lora(two(), "0", dim=2)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*1\.adapter\.linear_in\.weight"):
        apply_lora(two(), dim=2).load_state_dict(fewer.state_dict())


def test_a_bare_checkpoint_leaves_every_adapter() -> None:
    model, base = randomised(by_hand()), two()
    before = {k: v.clone() for k, v in model.state_dict().items() if "adapter." in k}
    model.load_state_dict(base.state_dict())
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())
    assert torch.equal(model[1].to_wrap.weight, base[1].weight)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copy_made_while_off_is_on(copied: Any, x: torch.Tensor) -> None:
    model = randomised(apply_lora(two(), dim=2))
    on = model(x)
    with disable_adapter(model):
        off = model(x)
        other = copied(model)
        assert torch.equal(model(x), off), "the model itself stays off"
        with disable_adapter(other):
            assert torch.equal(other(x), off)
    assert torch.equal(other(x), on)
    assert torch.equal(model(x), on)


def test_a_copy_of_a_layer_that_was_switched_off_for_good_is_off(x: torch.Tensor) -> None:
    model = randomised(apply_lora(two(), dim=2))
    model[0].disable_adapter_layers()
    with disable_adapter(model):
        other = copy.deepcopy(model)
    assert torch.equal(other(x), model(x))
    assert not other[0]._adapter_enabled


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x) * scale


class ScaledAdapter(LinearAdapter):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x) * scale


@pytest.mark.parametrize(("args", "kwargs"), [((2.0,), {}), ((), {"scale": 2.0})])
def test_further_arguments_reach_the_base_and_an_adapter_that_takes_them(
    args: Any, kwargs: Any, x: torch.Tensor
) -> None:
    base = Scaled(4, 3).double()
    plain = randomised(LoRALinear(base, LinearAdapter(base, dim=2)))
    torch.testing.assert_close(plain(x, *args, **kwargs), 2 * base(x) + plain.adapter(x))
    both = randomised(LoRALinear(base, ScaledAdapter(base, dim=2)))
    torch.testing.assert_close(both(x, *args, **kwargs), 2 * (base(x) + both.adapter(x)))
