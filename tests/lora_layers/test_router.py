"""`LoRATopKRouter`: the adapter's term in the logits of every kind of router, and nothing else of routing changed."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from opake.errors import InputError, PatchError
from opake.functional import per_example_grads
from opake.lora import LinearAdapter, LoRATopKRouter, apply_lora, disable_adapter
from opake.testing.oracle import model_loop_gradients, relative_error

from .subjects import BATCH, checkpointing, double_model, loop_and_vmap, patch, randomised, trainable

# families with bare weights, subclasses of nn.Linear, and inner linear layers, and the index of the logits they return
FAMILIES = {
    "mixtral": 0,
    "qwen3_moe": 0,
    "gpt_oss": 0,
    "deepseek_v3": 0,
    "deepseek_v4": 0,
    "olmoe": 0,
    "llama4_text": 1,
    "phimoe": 0,
    "dbrx": 0,
    "hunyuan_v1_moe": 0,
}
# these compute their routers, or softmax, in float32, whatever the model has
FLOAT = ("deepseek_v3", "deepseek_v4", "llama4_text", "hunyuan_v1_moe", "dbrx")
ROUTER = re.compile(r".*\.(gate|router)")
SIZE = {"dtype": torch.float64}


def adapted(model_type: str, **config: Any) -> Any:
    return randomised(apply_lora(double_model(model_type, **config), ROUTER, dim=2))


def routers(model: Any) -> list[LoRATopKRouter]:
    return [module for module in model.modules() if isinstance(module, LoRATopKRouter)]


def rows_for(router: LoRATopKRouter, *examples: int) -> torch.Tensor:
    # the gate of HunYuan takes batches alone
    lead = (1, 7) if "HunYuan" in type(router.to_wrap).__name__ else (7,)
    return torch.randn(*examples, *lead, router.adapter.in_features, dtype=torch.float64)


def answers(router: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What a router returns, some of them logits alone, as a tuple."""
    found = router(x)
    return found if isinstance(found, tuple) else (found,)


def merged(router: LoRATopKRouter) -> nn.Module:
    """The router alone, with the adapter in its weight."""
    twin = copy.deepcopy(router.to_wrap)
    holder: Any = next(m for m in twin.modules() if "weight" in m._parameters)
    with torch.no_grad():
        holder.weight += router.adapter.delta_weight()
    return twin


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_term_is_in_the_logits_before_anything_is_chosen(model_type: str) -> None:
    model = adapted(model_type).eval()
    router = routers(model)[-1]
    x = rows_for(router)
    for got, want in zip(answers(router, x), answers(merged(router), x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    every = zip(answers(router, x), answers(router.to_wrap, x), strict=True)
    assert any(not torch.allclose(got.float(), was.float()) for got, was in every)


# the tiny DBRX of an older Transformers does not run, with or without adapters
@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name != "dbrx"])
def test_disabled_the_model_is_stock_bit_for_bit(model_type: str) -> None:
    stock = double_model(model_type).eval()
    model = randomised(apply_lora(copy.deepcopy(stock), ROUTER))
    with torch.no_grad():
        want = stock(**BATCH).logits
        assert not torch.allclose(model(**BATCH).logits, want)
        with disable_adapter(model):
            assert torch.equal(model(**BATCH).logits, want)
        assert not torch.allclose(model(**BATCH).logits, want)


# torch's own remark on an operator of the stock routers
SLOW = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


@SLOW
@pytest.mark.parametrize("model_type", FAMILIES)
def test_per_example_gradients_of_a_router(model_type: str) -> None:
    model = adapted(model_type).eval()
    patch(model)
    router = routers(model)[-1]
    loop, got = loop_and_vmap(router, rows_for(router, 3))
    assert len(loop) == 2
    assert relative_error(got, loop) < (1e-5 if model_type in FLOAT else 1e-9)


@SLOW
@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name not in ("dbrx", "phimoe")])
def test_per_example_gradients_of_a_model(model_type: str) -> None:
    model = adapted(model_type)
    if len(answers(routers(model)[-1], rows_for(routers(model)[-1]))) == 1:
        pytest.skip(
            "experts are chosen outside the router here, and its batched experts write into what backward needs"
        )
    want = model_loop_gradients(model, **BATCH)
    patch(model)
    got = per_example_grads(model, engine="vmap")(trainable(model), **BATCH)
    assert len(got) == 2 * len(routers(model))
    assert relative_error(got, want) < (1e-5 if model_type in FLOAT else 1e-9)


@SLOW
def test_per_example_gradients_through_sparsemixer() -> None:
    # in eval mode it draws nothing, and the router's gradient is that of the auxiliary loss
    model = adapted("phimoe", output_router_logits=True, router_aux_loss_coef=0.5).eval()
    want = model_loop_gradients(model, **BATCH)
    patch(model)
    got = per_example_grads(model, engine="vmap")(trainable(model), **BATCH)
    # older Transformers take the auxiliary loss in float32
    assert relative_error(got, want) < 1e-6


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "olmoe", "gpt_oss"])
def test_recorded_logits_and_auxiliary_loss_have_the_term(model_type: str) -> None:
    model = adapted(model_type).eval()
    found = model(**BATCH, output_router_logits=True)
    assert len(found.router_logits) == len(routers(model))
    wrapped, seen = routers(model)[0], []
    wrapped.to_wrap.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(**BATCH)
    want = functional.linear(seen[0].reshape(-1, 32), merged(wrapped).weight, getattr(wrapped.to_wrap, "bias", None))
    torch.testing.assert_close(found.router_logits[0].reshape(want.shape), want)
    with disable_adapter(model):
        without = model(**BATCH, output_router_logits=True)
    assert not torch.allclose(found.aux_loss, without.aux_loss)
    loss = found.aux_loss
    grads = torch.autograd.grad(loss, list(wrapped.adapter.parameters()))
    assert all(float(g.abs().max()) > 0 for g in grads)


@SLOW
def test_per_example_gradients_of_the_auxiliary_loss() -> None:
    model = adapted("mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    want = model_loop_gradients(model, **BATCH)
    patch(model)
    got = per_example_grads(model, engine="vmap")(trainable(model), **BATCH)
    assert relative_error(got, want) < 1e-6


def test_jitter_is_drawn_once_and_shared() -> None:
    model = adapted("phimoe", input_jitter_noise=0.3, router_jitter_noise=0.0).train()
    router = routers(model)[0]
    rows: list[torch.Tensor] = []
    router.adapter.register_forward_pre_hook(lambda _, args: rows.append(args[0].clone()))
    x = torch.randn(5, 32, dtype=torch.float64)
    torch.manual_seed(0)
    logits = router(x.clone())[0]
    torch.testing.assert_close(logits, functional.linear(rows[0], merged(router).weight))
    assert not torch.allclose(rows[0], x), "the adapter sees the jittered rows"
    torch.manual_seed(0)
    drawn = torch.empty_like(x).uniform_(0.7, 1.3)
    torch.testing.assert_close(rows[0], x * drawn)


def test_an_expert_bias_affects_the_selection_only() -> None:
    model = adapted("deepseek_v4").eval()
    router = routers(model)[-1]
    assert type(router.to_wrap).__name__ == "DeepseekV4TopKRouter"
    x = torch.randn(6, 32, dtype=torch.float64)
    logits, _, chosen = router(x)
    router.to_wrap.e_score_correction_bias[:] = torch.tensor([50.0, 0, 0, 50.0])
    same, weights, now = router(x)
    assert torch.equal(same, logits)
    assert not torch.equal(chosen, now)
    assert {tuple(sorted(row)) for row in now.tolist()} == {(0, 3)}
    scores = router.to_wrap.score_fn(logits).gather(1, now)
    want = scores / (scores.sum(-1, keepdim=True) + 1e-20) * router.to_wrap.routed_scaling_factor
    torch.testing.assert_close(weights, want)


def test_a_hash_router_takes_its_ids() -> None:
    model = adapted("deepseek_v4").eval()
    router = routers(model)[0]
    if type(router.to_wrap).__name__ != "DeepseekV4HashRouter":
        pytest.skip("the tiny model of this Transformers has no hash router")
    x, ids = torch.randn(6, 32, dtype=torch.float64), torch.arange(6)
    for got, want in zip(router(x, ids), merged(router)(x, ids), strict=True):
        torch.testing.assert_close(got, want)


class Megatron(nn.Module):
    """A router of Megatron's form that writes down what it was asked."""

    def __init__(self, forced: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, **SIZE))
        self.config = type("Config", (), {"moe_router_force_load_balancing": forced})()
        self.calls: list[str] = []

    def _maintain_float32_expert_bias(self) -> None:
        self.calls.append("bias")

    def apply_input_jitter(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append("jitter")
        return x * 1.5

    def gating(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append("gating")
        return functional.linear(x, self.weight)

    def routing(self, logits: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append("routing")
        return logits.softmax(-1) * scale, logits


def test_megatrons_form() -> None:
    base, x = Megatron(), torch.randn(5, 6, **SIZE)
    router = randomised(LoRATopKRouter(base, LinearAdapter(base, dim=2)))
    probabilities, logits = router(x, scale=2.0)
    assert base.calls == ["bias", "jitter", "gating", "routing"]
    torch.testing.assert_close(logits, 1.5 * (x @ base.weight.T) + router.adapter(1.5 * x))
    torch.testing.assert_close(probabilities, 2 * logits.softmax(-1))
    router.disable_adapter_layers()
    assert torch.equal(router(x)[1], functional.linear(x * 1.5, base.weight))
    router.enable_adapter_layers()
    loop, got = loop_and_vmap(router, torch.randn(3, 5, 6, **SIZE))
    for name, want in loop.items():
        torch.testing.assert_close(got[name], want)


class WithZLoss(Megatron):
    """Its routing keeps the z-loss and the auxiliary loss of the logits, as Megatron's does."""

    def routing(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        self.z_loss = torch.logsumexp(logits, -1).square().mean()
        probabilities = logits.softmax(-1)
        chosen = functional.one_hot(logits.topk(2, -1).indices, 4).sum(1).to(logits.dtype)
        self.aux_loss = (probabilities.mean(0) * chosen.mean(0)).sum()
        return probabilities, logits


@pytest.mark.parametrize("name", ["z_loss", "aux_loss"])
def test_z_loss_and_auxiliary_loss_have_the_term_and_its_gradient(name: str) -> None:
    base, x = WithZLoss(), torch.randn(5, 6, **SIZE)
    router = randomised(LoRATopKRouter(base, LinearAdapter(base, dim=2)))
    twin = WithZLoss()
    twin.load_state_dict(base.state_dict())
    A, B = router.adapter.linear_in.weight, router.adapter.linear_out.weight
    router(x)
    twin.routing(1.5 * x @ (base.weight + router.adapter.scale * B @ A).T)
    got, want = getattr(base, name), getattr(twin, name)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, (A, B)), torch.autograd.grad(want, (A, B)))
    router.disable_adapter_layers()
    router(x)
    assert not torch.allclose(getattr(base, name), got)


def test_forced_load_balancing_comes_after_the_term() -> None:
    base, x = Megatron(forced=True), torch.randn(5, 6, **SIZE)
    router = randomised(LoRATopKRouter(base, LinearAdapter(base, dim=2)))
    torch.manual_seed(0)
    logits = router(x)[1]
    torch.manual_seed(0)
    assert torch.equal(logits, torch.randn(5, 4, **SIZE))


@pytest.mark.parametrize("form", ["matmul of t", "@ of T", "transposed", "cast", "keyword"])
def test_other_ways_to_write_the_product(form: str) -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6, **SIZE))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            w = self.weight
            return {
                "matmul of t": lambda: torch.matmul(x, w.t()),
                "@ of T": lambda: x @ w.T,
                "transposed": lambda: x @ w.transpose(0, 1),
                "cast": lambda: functional.linear(x.float(), w.float()).double(),
                "keyword": lambda: functional.linear(input=x, weight=w),
            }[form]().sigmoid()

    base, x = Router(), torch.randn(5, 6, **SIZE)
    router = randomised(LoRATopKRouter(base, LinearAdapter(base, dim=2)))
    want = (x @ base.weight.T + router.adapter(x)).sigmoid()
    torch.testing.assert_close(router(x), want, rtol=1e-6, atol=1e-6)


def test_a_product_that_is_not_recognised_is_an_error_not_a_silent_base() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.einsum("th,eh->te", x, self.weight)

    base = Router()
    with pytest.raises(PatchError, match="multiplied by its weight 0 times"):
        LoRATopKRouter(base, LinearAdapter(base))(torch.randn(5, 6))


def test_what_does_not_fit_is_refused_at_once() -> None:
    base = nn.Linear(6, 4)
    with pytest.raises(InputError, match="maps 6 to 4 experts and the adapter 6 to 5"):
        LoRATopKRouter(base, LinearAdapter(nn.Linear(6, 5)))
    with pytest.raises(InputError, match="no single weight"):
        LoRATopKRouter(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4)), LinearAdapter(base))
    with pytest.raises(InputError, match="no single weight"):
        LoRATopKRouter(nn.LayerNorm(4), LinearAdapter(base))


def test_dropout_and_reduced_precision() -> None:
    model = apply_lora(double_model("mixtral"), ["gate"], dropout=0.5).bfloat16()
    router = randomised(model.model.layers[0].mlp.gate)
    x = torch.randn(50, 32, dtype=torch.bfloat16)
    assert not torch.equal(router(x)[0], router(x)[0]), "a new mask each time"
    assert router(x)[0].dtype == torch.bfloat16


def test_attributes_and_names_are_those_of_the_router() -> None:
    model = adapted("deepseek_v3")
    router = routers(model)[-1]
    assert router.e_score_correction_bias is router.to_wrap.e_score_correction_bias
    stock = set(double_model("deepseek_v3").state_dict())
    assert {name for name in model.state_dict() if ".adapter." not in name} == stock


def test_checkpointing_recomputes_the_same() -> None:
    model = adapted("mixtral")
    want = torch.autograd.grad(model(**BATCH).loss, list(trainable(model).values()))
    checkpointing(model)
    got = torch.autograd.grad(model(**BATCH).loss, list(trainable(model).values()))
    torch.testing.assert_close(got, want)
