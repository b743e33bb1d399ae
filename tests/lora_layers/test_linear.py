"""`LoRALinear`: base plus adapter, in the form of the base, under the names of the base."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from opake.errors import InputError, PatchError
from opake.lora import FusedLoRALinear, LinearAdapter, LoRALinear

from .subjects import fused, loop_and_vmap, randomised, trainable


def layer(base: nn.Module | None = None, **choices: Any) -> LoRALinear:
    base = (base or nn.Linear(6, 4)).double().requires_grad_(False)
    return randomised(LoRALinear(base, LinearAdapter(base, **{"dim": 2, **choices})))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("base", [nn.Linear(6, 4), nn.Linear(6, 4, bias=False), Conv1D(4, 6)])
def test_a_tensor_comes_back_as_a_tensor_through_one_op(base: nn.Module, x: torch.Tensor) -> None:
    wrapped = layer(base)
    got = wrapped(x)
    torch.testing.assert_close(got, wrapped.to_wrap(x) + wrapped.adapter(x))
    assert fused(got.sum()) == {"w": 1}


class Tuples(nn.Linear):
    """A linear layer that answers as Megatron's do."""

    form = "bias"

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        normed = 2 * x
        out = functional.linear(normed if "normed" in self.form else x, self.weight)
        return {
            "bias": (out, self.bias),
            "none": (out, None),
            "normed": ((out, normed), self.bias),
            "bias, normed": (out, self.bias, normed),
        }[self.form]


@pytest.mark.parametrize("form", ["bias", "none", "normed", "bias, normed"])
def test_a_tuple_comes_back_in_kind(form: str, x: torch.Tensor) -> None:
    wrapped = layer(Tuples(6, 4))
    wrapped.to_wrap.form = form
    base, got = wrapped.to_wrap(x), wrapped(x)
    rows = 2 * x if "normed" in form else x
    assert type(got) is tuple
    assert len(got) == len(base)
    out, was = (got[0][0], base[0][0]) if form == "normed" else (got[0], base[0])
    torch.testing.assert_close(out, was + wrapped.adapter(rows))
    if form == "normed":
        assert torch.equal(got[0][1], base[0][1])
    for now, before in zip(got[1:], base[1:], strict=True):
        assert now is before or torch.equal(now, before)
    product, bias, linear_input = wrapped.base_linear_forward(x)
    assert torch.equal(product, was)
    assert torch.equal(linear_input, rows)
    assert bias is (None if form == "none" else wrapped.bias)


def test_disabled_it_is_the_base_bit_for_bit(x: torch.Tensor) -> None:
    for base in (nn.Linear(6, 4), Tuples(6, 4)):
        wrapped = layer(base)
        wrapped.disable_adapter_layers()
        got, want = wrapped(x), wrapped.to_wrap(x)
        assert type(got) is type(want)
        for now, before in zip(got, want, strict=True):
            assert torch.equal(now, before)
        assert wrapped.weight is wrapped.to_wrap.weight
        wrapped.enable_adapter_layers()
        assert wrapped.weight is not wrapped.to_wrap.weight


@pytest.mark.parametrize("answer", [None, (), (1, 2), [1], {"out": 1}])
def test_another_answer_is_an_error(answer: Any, x: torch.Tensor) -> None:
    class Odd(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return answer

    with pytest.raises(InputError, match="should return a tensor or a tuple"):
        layer(Odd(6, 4))(x)


def test_extra_arguments_reach_base_and_adapter(x: torch.Tensor) -> None:
    class Takes(LinearAdapter):
        def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
            return super().forward(x) * factor

    class Base(nn.Linear):
        def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
            return super().forward(x) * factor

    base = Base(6, 4).double().requires_grad_(False)
    wrapped = randomised(LoRALinear(base, Takes(base)))
    torch.testing.assert_close(wrapped(x, factor=3.0), 3 * wrapped(x))
    with pytest.raises(TypeError, match="factor"):
        layer()(x, factor=3.0)


@pytest.mark.parametrize("base", [nn.Linear(6, 4), Conv1D(4, 6)])
def test_the_effective_weight_is_differentiable(base: nn.Module, x: torch.Tensor) -> None:
    wrapped = layer(base)
    weight = wrapped.weight if isinstance(base, nn.Linear) else wrapped.weight.T
    assert wrapped.bias is wrapped.to_wrap.bias
    torch.testing.assert_close(functional.linear(x, weight, wrapped.bias), wrapped(x))
    params = list(wrapped.adapter.parameters())
    got = torch.autograd.grad(functional.linear(x, weight).sin().sum(), params)
    want = torch.autograd.grad((wrapped(x) - wrapped.bias).sin().sum(), params)
    torch.testing.assert_close(got, want)


def test_the_effective_weight_has_the_dtype_of_the_base() -> None:
    base = nn.Linear(6, 4, dtype=torch.bfloat16)
    wrapped = randomised(LoRALinear(base, LinearAdapter(base, lora_dtype=torch.float32)))
    assert wrapped.weight.dtype == torch.bfloat16
    assert wrapped(torch.randn(2, 6, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_an_adapter_of_another_shape_or_kind_has_no_effective_weight() -> None:
    class Wide(nn.Module):
        def delta_weight(self) -> torch.Tensor:
            return torch.zeros(5, 6)

    base = nn.Linear(6, 4)
    with pytest.raises(PatchError, match="shape mismatch"):
        LoRALinear(base, Wide()).weight  # noqa: B018
    with pytest.raises(RuntimeError, match="delta_weight"):
        LoRALinear(base, nn.Linear(6, 4)).weight  # noqa: B018


def test_names_are_those_of_the_base() -> None:
    model = nn.Sequential(layer())
    names = ["0.weight", "0.bias", "0.adapter.linear_in.weight", "0.adapter.linear_out.weight"]
    assert list(model.state_dict()) == names
    assert list(dict(model.named_parameters())) == names
    assert model.get_parameter("0.bias") is model[0].to_wrap.bias
    assert model[0].in_features == 6, "attributes are those of the base"
    assert dict(model.named_modules())["0.to_wrap"] is model[0].to_wrap
    with pytest.raises(AttributeError, match="no_such"):
        model[0].no_such  # noqa: B018


def test_the_state_dict_makes_the_round_trip(x: torch.Tensor) -> None:
    model, other = nn.Sequential(layer()), nn.Sequential(randomised(layer(), seed=9))
    want = model(x)
    assert not torch.equal(other(x), want)
    assert str(other.load_state_dict(model.state_dict())) == "<All keys matched successfully>"
    assert torch.equal(other(x), want)
    copied = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other.load_state_dict(copied, assign=True)
    assert torch.equal(other(x), want)
    assert other[0].weight.shape == other[0].to_wrap.weight.shape


def test_a_plain_base_checkpoint_is_loaded_and_leaves_the_adapter(x: torch.Tensor) -> None:
    model, base = nn.Sequential(layer()), nn.Sequential(nn.Linear(6, 4).double())
    adapter = {name: p.clone() for name, p in model[0].adapter.named_parameters()}
    model.load_state_dict(base.state_dict())
    assert torch.equal(model[0].to_wrap.weight, base[0].weight)
    assert all(torch.equal(p, adapter[name]) for name, p in model[0].adapter.named_parameters())
    base.load_state_dict({name: t for name, t in model.state_dict().items() if "adapter." not in name})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"0.bias": None}, 'Missing key.*"0.bias"'),
        ({"0.adapter.linear_in.weight": None}, 'Missing key.*"0.adapter.linear_in.weight"'),
        ({"0.more": torch.zeros(1)}, 'Unexpected key.*"0.more"'),
        ({"0.weight": torch.zeros(4, 7)}, "size mismatch"),
    ],
)
def test_a_wrong_checkpoint_is_named_as_it_is_written(change: dict[str, Any], message: str) -> None:
    model = nn.Sequential(layer())
    state = {name: tensor for name, tensor in {**model.state_dict(), **change}.items() if tensor is not None}
    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict(state)


def test_copies_casts_and_swaps_keep_base_and_wrapper_together(x: torch.Tensor) -> None:
    model = nn.Sequential(layer())
    want = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin[0].to_wrap._parameters is twin[0]._parameters
        nn.init.zeros_(twin[0].to_wrap.weight)
        torch.testing.assert_close(twin(x), want - x @ model[0].to_wrap.weight.T)
    swapped = functional_call(model, {"0.weight": torch.zeros(4, 6, dtype=torch.float64)}, (x,))
    torch.testing.assert_close(swapped, want - x @ model[0].to_wrap.weight.T)
    assert torch.equal(model(x), want), "functional_call puts back what it found"
    model[0].weight = nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))
    torch.testing.assert_close(model(x), swapped)
    assert {t.dtype for t in model.bfloat16().state_dict().values()} == {torch.bfloat16}
    assert model.to("meta")[0].to_wrap.weight.is_meta


def doubled(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return 2 * output


@pytest.mark.parametrize("where", ["", "to_wrap", "adapter", "adapter.linear_in", "adapter.linear_out"])
def test_hooks_run(where: str, x: torch.Tensor) -> None:
    wrapped = layer()
    base, delta = wrapped.to_wrap(x), wrapped.adapter(x)
    wrapped.get_submodule(where).register_forward_hook(doubled)
    want = {"": 2 * (base + delta), "to_wrap": 2 * base + delta}.get(where, base + 2 * delta)
    torch.testing.assert_close(wrapped(x), want)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_trained_base_gets_its_gradient(name: str, x: torch.Tensor) -> None:
    wrapped = layer()
    parameter = getattr(wrapped.to_wrap, name).requires_grad_()
    got = torch.autograd.grad(wrapped(x).sin().sum(), parameter)[0]
    want = torch.autograd.grad((wrapped.to_wrap(x) + wrapped.adapter(x)).sin().sum(), parameter)[0]
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("shape", [(6,), (0, 6), (2, 0, 6), (1, 6), (2, 3, 4, 6)])
def test_any_number_of_rows(shape: tuple[int, ...]) -> None:
    wrapped, x = layer(), torch.randn(shape, dtype=torch.float64, requires_grad=True)
    out = wrapped(x)
    torch.testing.assert_close(out, wrapped.to_wrap(x) + wrapped.adapter(x))
    out.sum().backward()
    assert x.grad is not None


def test_strided_rows_and_gradients() -> None:
    wrapped, x = layer(), torch.randn(6, 5, 3, dtype=torch.float64).permute(2, 1, 0)
    grad = torch.randn(4, 5, 3, dtype=torch.float64).permute(2, 1, 0)
    params = list(wrapped.adapter.parameters())
    got = torch.autograd.grad(wrapped(x), params, grad)
    want = torch.autograd.grad(wrapped.to_wrap(x) + wrapped.adapter(x), params, grad.contiguous())
    torch.testing.assert_close(got, want)


def test_the_output_may_be_written_into(x: torch.Tensor) -> None:
    wrapped = layer()
    out = wrapped(x)
    want = torch.autograd.grad((out * 3).sum(), list(wrapped.adapter.parameters()))
    got = torch.autograd.grad(wrapped(x).mul_(3).sum(), list(wrapped.adapter.parameters()))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("amount", [torch.bfloat16, torch.float16])
def test_autocast(amount: torch.dtype) -> None:
    base = nn.Linear(6, 4).requires_grad_(False)
    wrapped, x = randomised(LoRALinear(base, LinearAdapter(base))), torch.randn(5, 6)
    with torch.autocast("cpu", amount):
        out = wrapped(x)
        assert out.dtype == amount
    out.float().sum().backward()
    assert {p.grad.dtype for p in wrapped.adapter.parameters()} == {torch.float32}
    torch.testing.assert_close(wrapped(x).to(amount), out, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("base", [nn.Linear(6, 4), Conv1D(4, 6), Tuples(6, 4)])
@pytest.mark.parametrize("choices", [{}, {"dropout": 0.0, "lora_dtype": torch.float64, "alpha": 3}])
def test_per_example_gradients(base: nn.Module, choices: dict[str, Any], x: torch.Tensor) -> None:
    loop, got = loop_and_vmap(layer(copy.deepcopy(base), **choices), x)
    assert len(loop) == 2
    for name, want in loop.items():
        torch.testing.assert_close(got[name], want)


def test_dropout_is_drawn_per_example(x: torch.Tensor) -> None:
    wrapped, same = layer(dropout=0.5), x[:1].expand(64, -1, -1)
    _, got = loop_and_vmap(wrapped, same, randomness="different")
    assert len({tuple(g.flatten().tolist()) for g in got["adapter.linear_out.weight"]}) > 60
    _, got = loop_and_vmap(wrapped, same, randomness="same")
    assert len({tuple(g.flatten().tolist()) for g in got["adapter.linear_out.weight"]}) == 1


def test_a_wrapper_is_not_wrapped_again() -> None:
    wrapped = layer()
    with pytest.raises(InputError, match="this Linear has an adapter already"):
        LoRALinear(wrapped, wrapped.adapter)


def test_a_parametrized_base(x: torch.Tensor) -> None:
    class Twice(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    wrapped = layer()
    weight = wrapped.to_wrap.weight
    torch.nn.utils.parametrize.register_parametrization(wrapped.to_wrap, "weight", Twice())
    want = functional.linear(x, 2 * weight, wrapped.bias) + wrapped.adapter(x)
    torch.testing.assert_close(wrapped(x), want)
    torch.testing.assert_close(functional.linear(x, wrapped.weight, wrapped.bias), want)


def test_ensembles_by_stacking() -> None:
    models = [randomised(layer(nn.Linear(6, 4)), seed) for seed in range(3)]
    params, buffers = torch.func.stack_module_state(models)
    x = torch.randn(2, 6, dtype=torch.float64)

    def call(params: Any, buffers: Any) -> torch.Tensor:
        return functional_call(models[0], (params, buffers), (x,))

    out = torch.vmap(call)(params, buffers)
    torch.testing.assert_close(out, torch.stack([model(x) for model in models]))


@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled(fullgraph: bool, x: torch.Tensor) -> None:
    wrapped = layer()
    compiled = torch.compile(wrapped, backend="aot_eager", fullgraph=fullgraph)
    torch.testing.assert_close(compiled(x), wrapped(x))


@pytest.mark.parametrize("base", [nn.Linear(6, 4), Conv1D(4, 6)])
@pytest.mark.parametrize("other", [nn.Linear(5, 4), nn.Linear(6, 5), nn.Linear(4, 6)])
def test_an_adapter_of_other_sizes_is_refused_at_once(base: nn.Module, other: nn.Linear) -> None:
    sizes = f"{other.in_features} to {other.out_features}"
    with pytest.raises(InputError, match=f"maps 6 to 4 and the adapter {sizes}; make it of the layer"):
        LoRALinear(base, LinearAdapter(other))


def test_only_modules_are_taken() -> None:
    base = nn.Linear(6, 4)
    for args, message in (((3, base), "to_wrap=3 is a int"), ((base, None), "adapter=None is a NoneType")):
        with pytest.raises(InputError, match=message):
            LoRALinear(*args)  # type: ignore[arg-type]


# torch's own remark on what its hessian uses
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
@pytest.mark.parametrize("kind", [LoRALinear, FusedLoRALinear])
def test_unfused_it_has_derivatives_of_any_order(kind: Any) -> None:
    base = nn.Linear(4, 3).double().requires_grad_(False)
    wrapped = randomised(kind(base, LinearAdapter(base, dim=2)))
    params = {name: p.detach() for name, p in trainable(wrapped).items()}
    x = torch.randn(5, 4, dtype=torch.float64)

    def value(params: Any) -> torch.Tensor:
        out = functional_call(wrapped, params, (x,))
        return (out if isinstance(out, torch.Tensor) else out[0]).sin().sum()

    with pytest.raises(RuntimeError, match="forward-mode differentiation"):
        torch.func.hessian(value)(params)
    wrapped.fuse = False
    assert fused(value(params)) == {}
    found = torch.func.hessian(value)(params)

    def plain(params: Any) -> torch.Tensor:
        A, B = params["adapter.linear_in.weight"], params["adapter.linear_out.weight"]
        return (functional.linear(x, base.weight, base.bias) + wrapped.adapter.scale * x @ A.T @ B.T).sin().sum()

    want = torch.func.hessian(plain)(params)
    for first, second in ((a, b) for a in params for b in params):
        torch.testing.assert_close(found[first][second], want[first][second])


def test_the_effective_weight_is_compiled(x: torch.Tensor) -> None:
    wrapped = layer()
    compiled = torch.compile(
        lambda x: functional.linear(x, wrapped.weight, wrapped.bias), backend="eager", fullgraph=True
    )
    torch.testing.assert_close(compiled(x), wrapped(x))


def test_traced() -> None:
    wrapped, x = layer(), torch.randn(3, 6, dtype=torch.float64)
    with warnings.catch_warnings():
        # a FutureWarning from torch 2.15
        warnings.filterwarnings("ignore", "`torch.jit.trace", Warning)
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(wrapped, (x,))
    torch.testing.assert_close(traced(2 * x), wrapped(2 * x))
