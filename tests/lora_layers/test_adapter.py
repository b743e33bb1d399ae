"""`LinearAdapter`: the difference alone, in the shape, dtype and place of the layer it was made for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from opake.errors import InputError
from opake.lora import LinearAdapter

from .subjects import loop_and_vmap, randomised


def test_shape_dtype_and_names_are_taken_and_weights_are_not() -> None:
    linear = nn.Linear(6, 4, dtype=torch.bfloat16)
    adapter = LinearAdapter(linear)
    assert list(adapter.state_dict()) == ["linear_in.weight", "linear_out.weight"]
    assert (adapter.linear_in.weight.shape, adapter.linear_out.weight.shape) == ((8, 6), (4, 8))
    assert {p.dtype for p in adapter.parameters()} == {torch.bfloat16}
    assert all(p is not linear.weight for p in adapter.parameters())
    assert linear.weight.requires_grad, "freezing is the driver's business"
    assert not hasattr(adapter, "weight")
    assert adapter.scale == 4.0


def test_it_starts_at_zero_and_computes_the_difference_alone() -> None:
    linear = nn.Linear(6, 4).double()
    adapter, x = LinearAdapter(linear, dim=3, alpha=6), torch.randn(2, 5, 6, dtype=torch.float64)
    assert torch.equal(adapter(x), torch.zeros(2, 5, 4, dtype=torch.float64))
    randomised(adapter)
    want = 2 * (x @ adapter.linear_in.weight.T) @ adapter.linear_out.weight.T
    torch.testing.assert_close(adapter(x), want)
    torch.testing.assert_close(x @ adapter.delta_weight().T, want)


@pytest.mark.parametrize("method", ["xavier", "uniform"])
def test_initialisation(method: Any) -> None:
    linear = nn.Linear(300, 4)
    torch.manual_seed(0)
    A = LinearAdapter(linear, dim=100, lora_A_init_method=method).linear_in.weight
    limit = {"xavier": (6 / 400) ** 0.5, "uniform": (1 / 300) ** 0.5}[method]
    assert 0.99 * limit < float(A.detach().abs().max()) <= limit


def test_other_layers_and_dtypes() -> None:
    assert LinearAdapter(nn.Linear(6, 4), lora_dtype=torch.float16).linear_in.weight.dtype == torch.float16
    conv = LinearAdapter(Conv1D(4, 6))
    assert (conv.in_features, conv.out_features) == (6, 4)
    router = nn.Module()
    router.weight = nn.Parameter(torch.zeros(4, 6))
    assert LinearAdapter(router).linear_out.weight.shape == (4, 8)
    assert LinearAdapter(nn.Linear(6, 4, device="meta")).linear_in.weight.is_meta


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float64])
def test_the_output_has_the_dtype_of_the_input(given: torch.dtype, own: torch.dtype) -> None:
    adapter = randomised(LinearAdapter(nn.Linear(6, 4), lora_dtype=own))
    assert adapter(torch.randn(2, 6, dtype=given)).dtype == given


def test_autocast_decides_where_it_is_on() -> None:
    adapter, x = randomised(LinearAdapter(nn.Linear(6, 4))), torch.randn(2, 6)
    with torch.autocast("cpu", torch.bfloat16):
        assert adapter(x).dtype == torch.bfloat16


@pytest.mark.parametrize("position", ["pre", "post"])
def test_dropout_has_a_position(position: Any) -> None:
    adapter = randomised(LinearAdapter(nn.Linear(6, 4), dropout=0.5, dropout_position=position))
    x = torch.randn(50, 6)
    torch.manual_seed(0)
    got = adapter(x)
    torch.manual_seed(0)
    product = nn.functional.linear
    A, B = adapter.linear_in.weight, adapter.linear_out.weight
    if position == "pre":
        want = product(product(nn.functional.dropout(x), A), B) * adapter.scale
    else:
        want = nn.functional.dropout(product(product(x, A), B) * adapter.scale)
    torch.testing.assert_close(got, want)
    adapter.eval()
    torch.testing.assert_close(adapter(x), x @ adapter.delta_weight().T)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"dim": 0}, "dim=0"),
        ({"dim": 2.5}, "dim=2.5"),
        ({"alpha": "many"}, "alpha='many'"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"dropout": -0.1}, "dropout=-0.1"),
        ({"dropout_position": "middle"}, "it takes 'pre' or 'post'"),
        ({"lora_A_init_method": "kaiming"}, "it takes 'xavier' or 'uniform'"),
        ({"lora_dtype": torch.int8}, r"cannot be trained in torch\.int8"),
    ],
)
def test_a_choice_that_does_not_exist_is_an_error(choice: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinearAdapter(nn.Linear(6, 4), **choice)


def test_a_quantised_layer_asks_for_a_dtype() -> None:
    layer = nn.Linear(6, 4, bias=False)
    layer.weight = nn.Parameter(torch.zeros(12, 1, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(InputError, match="pass lora_dtype"):
        LinearAdapter(layer)
    assert LinearAdapter(layer, lora_dtype=torch.bfloat16).linear_in.weight.shape == (8, 6)


@pytest.mark.parametrize("what", [nn.LayerNorm(4), nn.Embedding(3, 4).weight, nn.ReLU(), "q_proj"])
def test_only_beside_a_linear_map(what: Any) -> None:
    with pytest.raises(InputError, match=r"goes beside a linear layer|expected \(out, in\)"):
        LinearAdapter(what)


def test_deep_copy_is_independent() -> None:
    adapter = randomised(LinearAdapter(nn.Linear(6, 4)))
    twin, x = copy.deepcopy(adapter), torch.randn(2, 6)
    want = adapter(x).detach()
    nn.init.zeros_(adapter.linear_out.weight)
    assert torch.equal(twin(x), want)


def test_per_example_gradients() -> None:
    adapter = randomised(LinearAdapter(nn.Linear(6, 4).double()))
    loop, got = loop_and_vmap(adapter, torch.randn(3, 5, 6, dtype=torch.float64))
    for name, want in loop.items():
        torch.testing.assert_close(got[name], want)
