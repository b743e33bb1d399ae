"""`FusedLoRALinear`: norm, product and adapter in one op, in two branches where something stands between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from opake.errors import InputError
from opake.lora import FusedLoRALinear, LayerNormLinear, LinearAdapter, LoRALinear

from .subjects import fused, loop_and_vmap, randomised

NORMS: dict[str, dict[str, Any]] = {
    "layer norm": {"normalization": "LayerNorm"},
    "centred layer norm": {"normalization": "LayerNorm", "zero_centered_gamma": True},
    "rms norm": {"normalization": "RMSNorm"},
    "centred rms norm": {"normalization": "RMSNorm", "zero_centered_gamma": True, "bias": False},
    "none": {},
}
BRANCH = {
    "in_features": 6,
    "out_features": 4,
    "tensor_parallel_mode": None,
    "tensor_parallel_group": None,
    "sequence_parallel": False,
    "accumulate_into_main_grad": False,
}


def layer(norm: str = "rms norm", **choices: Any) -> FusedLoRALinear:
    base: nn.Module = LayerNormLinear(6, 4, **NORMS[norm]) if NORMS[norm] else nn.Linear(6, 4)
    base.double().requires_grad_(False)
    for name, parameter in base.named_parameters():
        if "norm" in name or name == "bias":
            parameter.copy_(parameter + torch.randn(parameter.shape) * 0.3)
    return randomised(FusedLoRALinear(base, LinearAdapter(base, **{"dim": 2, **choices})))


def normed(base: Any, x: torch.Tensor) -> torch.Tensor:
    if not isinstance(base, LayerNormLinear):
        return x
    gamma = base.layer_norm_weight + base.zero_centered_gamma
    if base.normalization == "LayerNorm":
        return functional.layer_norm(x, (6,), gamma, base.layer_norm_bias, base.eps)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + base.eps) * gamma


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("norm", NORMS)
def test_norm_product_and_adapter_in_one_op(norm: str, x: torch.Tensor) -> None:
    fusion = layer(norm)
    out, bias = fusion(x)
    assert bias is None
    rows = normed(fusion.to_wrap, x)
    want = functional.linear(rows, fusion.to_wrap.weight, fusion.to_wrap.bias) + fusion.adapter(rows)
    torch.testing.assert_close(out, want)
    assert fused(out.sum()) == {"w": 1}
    fusion.disable_adapter_layers()
    assert torch.equal(fusion(x)[0], fusion.to_wrap(x))
    assert fusion(x)[1] is None


@pytest.mark.parametrize("norm", NORMS)
def test_the_branches_are_the_same_in_two_steps(norm: str, x: torch.Tensor) -> None:
    fusion = layer(norm)
    main, lora = fusion._make_fused_branches()
    product, rows = main(x)
    torch.testing.assert_close(rows, normed(fusion.to_wrap, x))
    torch.testing.assert_close(lora(rows, product), fusion(x)[0])
    torch.testing.assert_close(fusion._make_main_branch(**BRANCH)(x)[0], product)
    torch.testing.assert_close(fusion._make_lora_branch(**BRANCH)(rows, product), fusion(x)[0])


@pytest.mark.parametrize("norm", NORMS)
def test_a_plain_lora_linear_over_the_same_layer_agrees(norm: str, x: torch.Tensor) -> None:
    fusion = layer(norm)
    base: Any = fusion.to_wrap
    base.return_layernorm_output = True
    found = LoRALinear(base, fusion.adapter)(x)
    out = found[0][0] if isinstance(found, tuple) else found
    torch.testing.assert_close(fusion(x)[0], out)


def test_what_stands_between_is_not_passed_over(x: torch.Tensor) -> None:
    dropping = layer(dropout=0.5)
    assert fused(dropping(x)[0].sum()) == {}
    assert not torch.equal(dropping(x)[0], dropping(x)[0])
    trained = layer()
    trained.to_wrap.weight.requires_grad_()
    out = trained(x)[0]
    assert fused(out.sum()) == {}
    assert torch.autograd.grad(out.sum(), trained.to_wrap.weight)[0].abs().max() > 0
    hooked = layer()
    rows = normed(hooked.to_wrap, x)
    hooked.to_wrap.register_forward_hook(lambda _, args, out: 2 * out)
    want = 2 * functional.linear(rows, hooked.to_wrap.weight, hooked.to_wrap.bias) + hooked.adapter(rows)
    torch.testing.assert_close(hooked(x)[0], want)


class Negative(LinearAdapter):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -super().forward(x)


def test_an_adapter_of_another_class_computes_itself(x: torch.Tensor) -> None:
    base = nn.Linear(6, 4).double().requires_grad_(False)
    fusion = randomised(FusedLoRALinear(base, Negative(base, dim=2)))
    torch.testing.assert_close(fusion(x)[0], base(x) + fusion.adapter(x))


def test_a_trained_norm_gets_its_gradient_through_both_branches(x: torch.Tensor) -> None:
    fusion = layer()
    gamma = fusion.to_wrap.layer_norm_weight.requires_grad_()
    rows = normed(fusion.to_wrap, x)
    want = functional.linear(rows, fusion.to_wrap.weight, fusion.to_wrap.bias) + fusion.adapter(rows)
    got = torch.autograd.grad(fusion(x)[0].sin().sum(), gamma)
    torch.testing.assert_close(got, torch.autograd.grad(want.sin().sum(), gamma))


@pytest.mark.parametrize("norm", NORMS)
def test_per_example_gradients(norm: str, x: torch.Tensor) -> None:
    fusion = layer(norm)
    if NORMS[norm]:
        fusion.to_wrap.layer_norm_weight.requires_grad_()
    loop, got = loop_and_vmap(fusion, x)
    assert len(loop) == 2 + bool(NORMS[norm])
    for name, want in loop.items():
        torch.testing.assert_close(got[name], want)


def test_only_what_can_be_fused_is_taken() -> None:
    linear = nn.Linear(6, 4)
    with pytest.raises(ValueError, match="unsupported class for the wrapped linear: Sequential"):
        FusedLoRALinear(nn.Sequential(linear), LinearAdapter(linear))
    with pytest.raises(ValueError, match="unsupported class for the LoRA adapter: Linear"):
        FusedLoRALinear(linear, nn.Linear(6, 4))
    with pytest.raises(ValueError, match="unsupported normalization 'BatchNorm'"):
        LayerNormLinear(6, 4, normalization="BatchNorm")
    base = LayerNormLinear(6, 4)
    base.normalization = "BatchNorm"
    with pytest.raises(InputError, match="unsupported normalization 'BatchNorm'"):
        FusedLoRALinear(base, LinearAdapter(base))
    fusion = layer()
    with pytest.raises(InputError, match="maps 6 to 4"):
        fusion._make_main_branch(**{**BRANCH, "out_features": 5})


@pytest.mark.parametrize("branch", ["_make_main_branch", "_make_lora_branch"])
@pytest.mark.parametrize(
    "split",
    [
        {"tensor_parallel_mode": "column"},
        {"tensor_parallel_mode": "row"},
        {"tensor_parallel_group": object()},
        {"sequence_parallel": True},
        {"accumulate_into_main_grad": True},
    ],
)
def test_nothing_is_split_between_devices(branch: str, split: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match="leave"):
        getattr(layer(), branch)(**{**BRANCH, **split})


def test_its_state_dict_is_that_of_the_layer_and_the_adapter() -> None:
    names = ["layer_norm_weight", "weight", "bias", "adapter.linear_in.weight", "adapter.linear_out.weight"]
    fusion, other = layer(), layer()
    assert list(fusion.state_dict()) == names
    other.load_state_dict(fusion.state_dict())
    x = torch.randn(2, 6, dtype=torch.float64)
    assert torch.equal(fusion(x)[0], other(x)[0])
