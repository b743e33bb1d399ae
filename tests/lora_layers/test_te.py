"""`TEFusedLoRALinear`: what it asks of Transformer Engine, by a stand-in that checks calls; for real if it is there."""

from __future__ import annotations

import copy
import importlib.util
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from opake.errors import MissingDependency
from opake.lora import LinearAdapter, TEFusedLoRALinear

from .subjects import loop_and_vmap, randomised
from .te_stand_in import SIGNATURES, LayerNormLinear, TELinear, fp8, install, signature_of

BRANCH = {
    "in_features": 6,
    "out_features": 4,
    "tensor_parallel_mode": None,
    "tensor_parallel_group": None,
    "sequence_parallel": False,
    "accumulate_into_main_grad": False,
}


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in under the names of Transformer Engine."""
    return install(monkeypatch)


def subject(base: nn.Module | None = None, **choices: Any) -> Any:
    base = (base or LayerNormLinear("RMSNorm")).double().requires_grad_(False)
    return randomised(TEFusedLoRALinear(base, LinearAdapter(base, **{"dim": 2, **choices})))


def kinds(branch: Any) -> list[str]:
    return [type(op).__name__ for op in branch.ops]


BASES: dict[str, Any] = {
    "layer norm": lambda: LayerNormLinear("LayerNorm"),
    "rms norm": lambda: LayerNormLinear("RMSNorm"),
    "centred": lambda: LayerNormLinear("RMSNorm", True),
    "te linear": lambda: TELinear(6, 4),
    "torch linear": lambda: nn.Linear(6, 4),
    "no bias": lambda: nn.Linear(6, 4, bias=False),
    "empty bias": lambda: TELinear(6, 4, bias=False),
}


@pytest.mark.parametrize("base", BASES)
def test_the_branches_compute_what_a_lora_linear_does(te: Any, base: str) -> None:
    layer, x = subject(BASES[base]()), torch.randn(3, 6, dtype=torch.float64)
    out, bias = layer(x)
    assert bias is None
    found = layer._separately(x)
    product = found[0][0] if isinstance(found, tuple) else found
    torch.testing.assert_close(out, product)
    assert fp8 == [True, False], "the LoRA branch never runs in fp8"
    grads = torch.autograd.grad(out.sin().sum(), list(layer.adapter.parameters()))
    want = torch.autograd.grad(product.sin().sum(), list(layer.adapter.parameters()))
    torch.testing.assert_close(grads, want)


def test_the_operations_are_those_of_the_fuser(te: Any) -> None:
    layer = subject(dropout=0.5)
    main, lora = layer._make_fused_branches()
    assert kinds(main) == ["RMSNorm", "Quantize", "MakeExtraOutput", "Linear"]
    assert kinds(lora) == ["Dropout", "Linear", "Linear", "ConstantScale", "AddExtraInput"]
    assert main.ops[0].weight is layer.to_wrap.layer_norm_weight
    assert main.ops[3].weight is layer.to_wrap.weight
    assert main.ops[3].bias is layer.to_wrap.bias
    assert lora.ops[1].weight is layer.adapter.linear_in.weight
    assert lora.ops[2].weight is layer.adapter.linear_out.weight
    assert (lora.ops[0].p, lora.ops[3].scale) == (0.5, 16.0)
    after = subject(nn.Linear(6, 4), dropout=0.5, dropout_position="post", dim=32, alpha=32)
    main, lora = after._make_fused_branches()
    assert kinds(main) == ["MakeExtraOutput", "Linear"]
    assert kinds(lora) == ["Linear", "Linear", "Dropout", "AddExtraInput"]


def test_the_stand_in_takes_what_is_documented(te: Any) -> None:
    for name, arguments in SIGNATURES.items():
        assert signature_of(getattr(te.ops, name)) == arguments, name


@pytest.mark.parametrize("post", [False, True])
def test_dropout_is_that_of_the_fuser(te: Any, post: bool) -> None:
    layer, x = subject(dropout=0.5, dropout_position="post" if post else "pre"), torch.randn(3, 6, dtype=torch.float64)
    torch.manual_seed(0)
    out = layer(x)[0]
    torch.manual_seed(0)
    torch.testing.assert_close(out, layer._separately(x)[0][0])
    assert fp8 == [True, False]
    assert not torch.equal(layer(x)[0], out)
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])


class Negative(LinearAdapter):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -super().forward(x)


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize("what", ["adapter", "layer", "part", "dropout"])
def test_what_the_fuser_would_compute_otherwise_takes_its_own_forward(te: Any, what: str) -> None:
    base = (Doubled(6, 4) if what == "layer" else nn.Linear(6, 4)).double().requires_grad_(False)
    kind = Negative if what == "adapter" else LinearAdapter
    layer: Any = randomised(TEFusedLoRALinear(base, kind(base, dim=2)))
    if what == "part":
        layer.adapter.linear_out = nn.Linear(2, 4).double()
    if what == "dropout":
        layer.adapter.dropout = nn.Tanh()
    x = torch.randn(3, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[0], base(x) + layer.adapter(x))
    assert fp8 == []


def test_main_gradients_are_those_of_the_layer_that_has_them(te: Any) -> None:
    base: Any = TELinear(6, 4)
    base.fuse_wgrad_accumulation = True
    layer = subject(base)
    layer.adapter.linear_in.weight.main_grad = torch.zeros(2, 6)
    main, lora = layer._make_fused_branches()
    assert main.ops[-1].accumulate_into_main_grad
    assert [op.accumulate_into_main_grad for op in lora.ops[:2]] == [True, False]


def test_the_branches_are_lazy_no_submodules_and_follow_the_parameters(te: Any) -> None:
    layer, x = subject(), torch.randn(3, 6, dtype=torch.float64)
    names = [name for name, _ in layer.named_parameters()]
    assert layer._fused_branches == ()
    layer(x)
    built = layer._fused_branches
    layer(x)
    assert layer._fused_branches[0] is built[0]
    assert [name for name, _ in layer.named_parameters()] == names
    layer.to_wrap.weight = nn.Parameter(torch.zeros_like(layer.to_wrap.weight))
    torch.testing.assert_close(layer(x)[0], layer._separately(x)[0][0])
    twin = copy.deepcopy(layer)
    nn.init.zeros_(layer.adapter.linear_out.weight)
    assert not torch.allclose(twin(x)[0], layer(x)[0])


def test_disabled_and_hooked_layers_take_their_own_forward(te: Any) -> None:
    layer, x = subject(), torch.randn(3, 6, dtype=torch.float64)
    layer.adapter.linear_in.register_forward_hook(lambda _, args, out: 2 * out)
    torch.testing.assert_close(layer(x)[0], layer._separately(x)[0][0])
    layer.disable_adapter_layers()
    assert torch.equal(layer(x)[0], layer.to_wrap(x)[0][0])
    assert fp8 == []


@pytest.mark.parametrize("base", BASES)
def test_per_example_gradients(te: Any, base: str) -> None:
    layer = subject(BASES[base]())
    loop, got = loop_and_vmap(layer, torch.randn(3, 5, 6, dtype=torch.float64))
    assert set(loop) == {"adapter.linear_in.weight", "adapter.linear_out.weight"}
    for name, want in loop.items():
        torch.testing.assert_close(got[name], want)
    assert fp8 == [True, False] * 3, "for the rows of the loop the branches ran, inside the transform they did not"


def test_only_what_can_be_fused_is_taken(te: Any) -> None:
    linear = nn.Linear(6, 4)
    with pytest.raises(ValueError, match="unsupported class for the wrapped linear: Sequential"):
        TEFusedLoRALinear(nn.Sequential(linear), LinearAdapter(linear))
    with pytest.raises(ValueError, match="unsupported class for the LoRA adapter: Linear"):
        TEFusedLoRALinear(linear, nn.Linear(6, 4))
    odd = LayerNormLinear("L2Norm")
    with pytest.raises(ValueError, match="unsupported normalization 'L2Norm'"):
        TEFusedLoRALinear(odd, LinearAdapter(odd))


@pytest.mark.parametrize("branch", ["_make_main_branch", "_make_lora_branch"])
@pytest.mark.parametrize(
    "split", [{"tensor_parallel_mode": "column"}, {"tensor_parallel_group": object()}, {"sequence_parallel": True}]
)
def test_nothing_is_split_between_devices(te: Any, branch: str, split: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match="not split between devices"):
        getattr(subject(), branch)(**{**BRANCH, **split})


def test_a_split_layer_is_refused_at_once(te: Any) -> None:
    base: Any = TELinear(6, 4)
    base.tp_size, base.parallel_mode, base.tp_group = 2, "column", None
    with pytest.raises(NotImplementedError, match="'column'"):
        TEFusedLoRALinear(base, LinearAdapter(base))


def test_without_transformer_engine_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.ops", None)
    linear = nn.Linear(6, 4)
    with pytest.raises(ImportError, match=r"pip install 'opake\[te\]'.*FusedLoRALinear") as caught:
        TEFusedLoRALinear(linear, LinearAdapter(linear))
    assert isinstance(caught.value, MissingDependency)


@pytest.mark.gpu
@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm", None])
def test_for_real(norm: str | None) -> None:
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs Transformer Engine")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytorch: Any = importlib.import_module("transformer_engine.pytorch")
    for name, arguments in SIGNATURES.items():
        assert signature_of(getattr(pytorch.ops, name))[: len(arguments)] == arguments, name
    made: Any = {"params_dtype": torch.bfloat16, "device": "cuda"}
    if norm is None:
        base = pytorch.Linear(64, 32, **made)
    else:
        base = pytorch.LayerNormLinear(64, 32, normalization=norm, **made)
    layer = randomised(TEFusedLoRALinear(base.requires_grad_(False), LinearAdapter(base, dim=16)).cpu()).cuda()
    x = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16)
    out, _ = layer(x)
    want = base(x) + 0
    normed = x
    if norm is not None:
        gamma = base.layer_norm_weight
        normed = (
            functional.layer_norm(x, (64,), gamma, base.layer_norm_bias, base.eps)
            if norm == "LayerNorm"
            else functional.rms_norm(x, (64,), gamma, base.eps)
        )
    torch.testing.assert_close(out, want + layer.adapter(normed), rtol=2e-2, atol=5e-2)
