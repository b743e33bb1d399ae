"""Linear layers whose weight or bias a hook computes take the unfused sum, and the routers' parts stay bare."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from opake.checking.tiny import tiny_model
from opake.errors import PatchError
from opake.lora import AdapterWrapper, apply_lora, merge_lora, remove_lora
from opake.lora.layers import read

from .subjects import fused, loop_and_vmap, randomised

old = pytest.mark.filterwarnings("ignore:`?torch.nn.utils.(weight|spectral)_norm:FutureWarning")
HOOKS: dict[str, Callable[[nn.Linear], Any]] = {
    "spectral_norm": torch.nn.utils.spectral_norm,
    "weight_norm": torch.nn.utils.weight_norm,
    "weight_norm of the bias": lambda layer: torch.nn.utils.weight_norm(layer, "bias"),
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.3),
    "prune the bias": lambda layer: prune.l1_unstructured(layer, "bias", amount=0.5),
    "parametrized": parametrizations.weight_norm,
}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def hooked(name: str) -> Any:
    model = Two().double().eval()
    HOOKS[name](model.b)
    return model


@old
@pytest.mark.parametrize("name", HOOKS)
def test_a_weight_that_a_hook_computes_is_not_fused(name: str) -> None:
    model = hooked(name)
    assert isinstance(read(model.b), str)
    x = torch.randn(4, 6, dtype=torch.float64)
    bare = model(x)
    apply_lora(model, ["a", "b"], dim=2)
    assert torch.equal(model(x), bare)
    randomised(model)
    rows = model.a(x)
    got = model(x)
    torch.testing.assert_close(got, model.b.to_wrap(rows) + model.b.adapter(rows))
    assert fused(got.sum()) == {"w": 1}
    other = copy.deepcopy(model)
    nn.init.zeros_(other.b.adapter.linear_out.weight)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), got)
    assert torch.equal(remove_lora(other)(x), bare)


@old
@pytest.mark.parametrize("name", ["spectral_norm", "prune", "prune the bias"])
def test_gradients_beside_a_hook(name: str) -> None:
    model = randomised(apply_lora(hooked(name), ["a", "b"], dim=2))
    loop, got = loop_and_vmap(model, torch.randn(3, 4, 6, dtype=torch.float64))
    for key, want in loop.items():
        torch.testing.assert_close(got[key], want)


@old
@pytest.mark.parametrize("name", ["spectral_norm", "prune"])
def test_a_computed_weight_is_not_merged_into(name: str) -> None:
    model = randomised(apply_lora(hooked(name), "b", dim=2))
    with pytest.raises(PatchError, match="cannot take a LinearAdapter into its weight"):
        merge_lora(model)


@pytest.mark.parametrize(("model_type", "router"), [("hunyuan_v1_moe", "wg"), ("jetmoe", "router.layer")])
def test_all_linear_leaves_the_parts_of_routers_alone(model_type: str, router: str) -> None:
    model = tiny_model(model_type)
    found = [name for name, _ in model.named_modules() if name.endswith(f".{router}")]
    assert found
    apply_lora(model)
    adapted = [name for name, module in model.named_modules() if isinstance(module, AdapterWrapper)]
    assert adapted
    assert not any(isinstance(model.get_submodule(name), AdapterWrapper) for name in found)
    # by name it is taken still
    apply_lora(remove_lora(model), router)
    assert all(isinstance(model.get_submodule(name), AdapterWrapper) for name in found)
