"""Repairs that find their sites by what a forward reads: router loss, experts, recurrent masks, old functions."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from opake.attention.interface import NAMES, Name
from opake.batching import functions, layer_drop
from opake.checking.judge import judged, loop_grads, relative_error
from opake.checking.tiny import tiny_batch, tiny_model
from opake.experts import aux_loss
from opake.masks import recurrent
from opake.patches import apply_model_patches, restore
from opake.patching.instance import rebind
from opake.patching.replace import globals_read, overlay
from opake.records import RecurrentMask, RouterAuxLoss
from opake.testing.vmapped import vmap_gradients

from .recorded import needs

LIMIT = 5e-6
pytestmark = [
    pytest.mark.filterwarnings("ignore::opake.errors.GenericFamilyWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]


class TestRouterLoss:
    @pytest.mark.parametrize("padding", ["right", "left", "none"])
    @pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "gpt_oss", "olmoe", "qwen2_moe"])
    def test_gradients_with_the_auxiliary_loss(self, model_type: str, padding: str) -> None:
        stock = tiny_model(model_type, output_router_logits=True, router_aux_loss_coef=0.5)
        model, rows = copy.deepcopy(stock), tiny_batch(padding=padding)
        without = tiny_model(model_type)
        report = apply_model_patches(model)
        assert [row.site for row in report.find(record="RouterLoss", state="applied")] == ["(model)"]
        want = loop_grads(stock, rows)
        assert relative_error(vmap_gradients(model, rows), want) <= LIMIT
        # the loss is there at all
        assert relative_error(loop_grads(without, rows), want) > 1e-3

    @pytest.mark.parametrize("masked", [True, False])
    def test_the_numbers_are_those_of_stock(self, masked: bool) -> None:
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func as stock

        B, T, E = 2, 6, 5
        logits = tuple(torch.randn(B * T, E, generator=torch.Generator().manual_seed(i)) for i in range(3))
        mask = (torch.arange(T) < torch.tensor([[6], [3]])).long() if masked else None
        want, slope = (f(logits) for f in _with_slope(lambda each: stock(each, E, 2, mask)))

        def ours(each: Any) -> torch.Tensor:
            return aux_loss.load_balancing_loss(stock, each, E, 2, mask)

        torch.testing.assert_close(ours(logits), want, rtol=0, atol=0)
        torch.testing.assert_close(grad(ours)(logits), slope)

    def test_without_logits_it_is_stock(self) -> None:
        assert aux_loss.load_balancing_loss(lambda *_: 0, None, 4) == 0

    def test_a_family_may_name_the_class(self) -> None:
        model = tiny_model("mixtral")
        record = RouterAuxLoss(type(model))
        assert record.fits(model) is None
        undo = record.apply(model)
        assert "forward" in vars(model)
        assert record.fits(model).state == "already"  # type: ignore[union-attr]
        undo()
        assert "forward" not in vars(model)
        assert RouterAuxLoss(nn.Linear).fits(nn.Linear(2, 2)).state == "stock"  # type: ignore[union-attr]


def _with_slope(f: Any) -> tuple[Any, Any]:
    def slope(logits: Any) -> Any:
        leaves = [each.clone().requires_grad_() for each in logits]
        return torch.autograd.grad(f(tuple(leaves)), leaves)

    return f, slope


class TestRecurrentMask:
    @pytest.mark.parametrize("model_type", ["qwen3_5_text", "lfm2", "bamba", "mamba2"])
    @pytest.mark.parametrize("padding", ["left", "right"])
    def test_a_padded_row_equals_the_row_alone(self, model_type: str, padding: str) -> None:
        """A mask that both sides ignore would be seen here."""
        stock = tiny_model(model_type)
        model, rows = copy.deepcopy(stock), tiny_batch(padding=padding)
        first = rows["attention_mask"].argmax(1)
        rows["labels"][torch.arange(len(first)), first] = -100
        apply_model_patches(model)
        got, padded = vmap_gradients(model, rows), loop_grads(stock, rows)
        assert relative_error(padded, got) < 1e-3
        for row, real in enumerate(rows["attention_mask"].bool()):
            alone = {name: value[row, real][None] for name, value in rows.items()}
            want = loop_grads(stock, alone)
            mine, theirs = ({n: g[row : row + 1] for n, g in side.items()} for side in (got, padded))
            # recurrences round in another order; the unpatched model is no nearer to itself, or to float64
            if relative_error(mine, want) > max(LIMIT, 2 * relative_error(theirs, want)):
                error, right, note = judged(mine, want, stock, alone)
                assert right, f"row {row}: relative error {error:.1e}, {note}"

    def test_the_mask_is_cut_to_the_tokens_at_hand(self) -> None:
        mask, embeds = torch.ones(2, 9), torch.zeros(2, 4, 8)
        assert recurrent.recurrent_mask(None, embeds, mask).shape == (2, 4)  # type: ignore[union-attr]
        assert recurrent.recurrent_mask(None, embeds[:, :1], mask) is None
        assert recurrent.recurrent_mask(None, embeds, None) is None
        assert recurrent.recurrent_mask(None, embeds, mask[:, None, None]) is None

    def test_a_function_that_ignores_one_row_is_replaced_inside_transforms_only(self) -> None:
        def stock(hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            return hidden if mask is None or mask.shape[0] == 1 else hidden * mask[:, :, None]

        hidden, mask = torch.ones(1, 3, 2), torch.tensor([[0, 1, 1]])
        assert recurrent._ignores_one_row(stock)
        assert torch.equal(recurrent.mask_padding(stock, hidden, mask), hidden)
        inside = vmap(lambda h, m: recurrent.mask_padding(stock, h[None], m[None])[0])(hidden, mask)
        assert torch.equal(inside, hidden * mask[:, :, None])

    def test_a_family_may_name_the_class(self) -> None:
        model = tiny_model("lfm2")
        _, module = next(recurrent.sites(model))
        record = RecurrentMask(type(module))
        assert record.fits(module) is None
        undo = record.apply(module)
        assert record.fits(module).state == "already"  # type: ignore[union-attr]
        undo()
        assert record.fits(module) is None
        assert RecurrentMask(nn.Linear).fits(nn.Linear(2, 2)).state == "stock"  # type: ignore[union-attr]

    def test_nothing_but_the_model_changes(self) -> None:
        model = tiny_model("qwen3_5_text")
        module = sys.modules[type(model).__module__]
        before = dict(vars(module))
        apply_model_patches(model)
        vmap_gradients(model, tiny_batch())
        assert all(vars(module)[name] is value for name, value in before.items())
        restore(model)
        assert "forward" not in vars(model.model)


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_experts_chosen_as_eager(model_type: str) -> None:
    stock = tiny_model(model_type)
    stock.set_experts_implementation("eager")
    model, rows = copy.deepcopy(stock), tiny_batch()
    apply_model_patches(model)
    assert relative_error(vmap_gradients(model, rows), loop_grads(stock, rows)) <= LIMIT
    assert torch.equal(model(**rows).loss, stock(**rows).loss)
    restore(model)
    assert all("forward" not in vars(module) for module in model.modules())


class Cube(torch.autograd.Function):
    """The old form, with a backward that is not the derivative, so that it is seen which one runs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 7 * x * grad


class Greedy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x.exp())
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


class Numbered(Greedy):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.factor = 2.0
        return x


def cubed(x: torch.Tensor) -> torch.Tensor:
    return Cube.apply(x)  # type: ignore[return-value]


class Direct(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Cube.apply(x).sum()  # type: ignore[union-attr]


class ThroughHelper(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cubed(x).sum()


class TestOldFunctions:
    @pytest.mark.parametrize("kind", [Direct, ThroughHelper])
    def test_their_own_backward_runs_inside_transforms(self, kind: type[nn.Module]) -> None:
        module, x = kind(), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        with pytest.raises(RuntimeError, match="setup_context"):
            vmap(grad(module))(x)
        undo = functions.apply(module)
        assert torch.equal(vmap(grad(module))(x), 7 * x)
        assert torch.equal(grad(lambda t: vmap(grad(module))(t).sum())(x), torch.full_like(x, 7))
        leaf = x.clone().requires_grad_()
        module(leaf).backward()
        assert torch.equal(leaf.grad, 7 * x)  # type: ignore[arg-type]
        # a patched module is still a site, so that a second call finds it
        assert [site for _, site in functions.sites(module)] == [module]
        undo()
        assert "forward" not in vars(module)

    @pytest.mark.parametrize(("old", "what"), [(Greedy, "a tensor that is not an input"), (Numbered, "ctx.factor")])
    def test_what_would_be_lost_is_refused(self, old: Any, what: str) -> None:
        with pytest.raises(NotImplementedError, match=f"{old.__name__} saves {what} for its backward"):
            grad(lambda x: functions.twin(old).apply(x).sum())(torch.ones(2))

    def test_functions_of_the_new_form_are_left_alone(self) -> None:
        assert not functions.is_old(functions.twin(Cube))
        assert not functions.is_old(torch.autograd.Function)
        assert functions.is_old(Cube)


class Dropping(nn.Module):
    def __init__(self, layerdrop: float) -> None:
        super().__init__()
        self.layerdrop = layerdrop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.rand([]) < self.layerdrop:
            return x
        return x * torch.rand(2).shape[0]


class TestNoLayerDrop:
    def test_a_probability_of_zero_draws_nothing_inside_transforms(self) -> None:
        module, x = Dropping(0.0), torch.ones(3)
        with pytest.raises(RuntimeError, match="data-dependent"):
            vmap(module, randomness="different")(x)
        undo = layer_drop.apply(module)
        assert torch.equal(vmap(module, randomness="different")(x), 2 * x)
        before = torch.get_rng_state()
        module(x)
        patched = torch.get_rng_state()
        torch.set_rng_state(before)
        Dropping(0.0)(x)
        assert torch.equal(patched, torch.get_rng_state())
        assert [site for _, site in layer_drop.sites(nn.Sequential(module))] == [module]
        undo()
        assert "forward" not in vars(module)

    def test_another_probability_is_left_alone(self) -> None:
        skip = layer_drop.fits(Dropping(0.1))
        assert skip is not None
        assert skip.reason == "layerdrop is 0.1: which layers run would differ from row to row"


class TestName:
    """Modeling files that ask for the implementation by name get the answer for the masks that they are given."""

    def test_it_is_found_under_its_own_name_and_taken_for_sdpa(self) -> None:
        name = Name("opake")
        assert {"opake": 1, "sdpa": 2}[name] == 1
        assert name in ("eager", "sdpa")
        assert name == "opake"
        assert (name != "sdpa") is False
        assert name != "eager"
        assert str(name) == "opake"
        assert str(name) != "sdpa"
        assert copy.deepcopy(name) == "sdpa"
        assert len({str(each) for each in NAMES.values()}) == 3

    def test_a_sparse_indexer_keeps_its_mask(self) -> None:
        """The class compares the name, and left its mask out for any that it does not know."""
        needs("glm_moe_dsa")
        stock = tiny_model("glm_moe_dsa")
        model, rows = copy.deepcopy(stock), tiny_batch()
        apply_model_patches(model)
        assert model.config._attn_implementation == "opake"
        torch.testing.assert_close(model(**rows).loss, stock(**rows).loss)
        assert relative_error(vmap_gradients(model, rows), loop_grads(stock, rows)) <= LIMIT


class TestOverlay:
    def test_lambdas_and_methods_that_forward_calls(self) -> None:
        module = Nested()
        assert set(globals_read(module, lambda value: value is helper)) == {"helper"}
        assert module(1.0) == (2.0, 2.0)
        undo = overlay(module, {"helper": lambda x: x + 10})
        assert module(1.0) == (11.0, 11.0)
        assert Nested()(1.0) == (2.0, 2.0)
        undo()
        assert module(1.0) == (2.0, 2.0)
        assert not {"forward", "_twice"} & set(vars(module))

    def test_a_name_that_is_only_an_attribute_is_not_read(self) -> None:
        assert globals_read(Nested(), lambda value: value is other) == {}

    def test_the_signature_survives(self) -> None:
        import inspect

        from opake.patching.replace import unbound

        model = tiny_model("lfm2")
        stock = inspect.signature(unbound(model.model, "forward"))
        new = rebind(unbound(model.model, "forward"), {"create_causal_mask": None})
        assert inspect.signature(new) == stock  # type: ignore[arg-type]


def helper(x: float) -> float:
    return x + 1


def other(x: float) -> float:
    return x


class Nested(nn.Module):
    def forward(self, x: float) -> tuple[float, float]:
        self.other = x
        return (lambda: helper(x))(), self._twice(x)

    def _twice(self, x: float) -> float:
        return helper(x)
