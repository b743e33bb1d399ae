"""Cases about experts: any implementation chosen, dense or grouped, frozen or adapted; and the router's loss."""

# ruff: noqa: TID253
from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch

from opake import hf
from opake.checking.tiny import tiny_model
from opake.patches import patch_report
from opake.testing.oracle import batch_gradients, model_loop_gradients
from opake.testing.vmapped import vmap_gradients

from .base import LIMITS, Suite, assert_close, assert_same_gradients

if TYPE_CHECKING:
    from opake.testing.workbench import Bench


def stacks(model: torch.nn.Module) -> list[str]:
    """Names of the parameters that hold all experts of a layer."""
    return [name for name, p in model.named_parameters() if p.dim() == 3 and ".experts." in name]


def routers(model: torch.nn.Module) -> list[str]:
    """Names of the matrices of routers that are no linear layers."""
    sites = [(name, module) for name, module in model.named_modules() if name.rpartition(".")[2] in ("gate", "router")]
    bare = [(name, module) for name, module in sites if not isinstance(module, torch.nn.Linear)]
    return [f"{name}.weight" for name, module in bare if "weight" in module._parameters]


def with_expert_lora(model: Any, names: Sequence[str] | None = None) -> Any:
    """`model` with a LoRA of rank 4 on every stack of experts and every router, or on `names`, both factors random."""
    from peft import LoraConfig, get_peft_model

    names = list(names or stacks(model) + routers(model))
    config = LoraConfig(r=4, lora_alpha=2, target_modules=[], target_parameters=names, init_lora_weights=False)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        # PEFT asks a deprecated name of Transformers, and has something to say about several parameters of a module
        warnings.simplefilter("ignore")
        torch.manual_seed(3)
        return get_peft_model(model, config).train()


class ExpertCases(Suite):
    def test_experts_are_served(self, bench: Bench) -> None:
        model = bench.build(self.attentions[0])
        report = bench.apply(model)
        sites = {name.rpartition(".")[0] for name in stacks(model)}
        for record in ("Experts(", "GroupedExperts"):
            rows = [row for row in report.rows if row.record.startswith(record)]
            assert {row.site: row.state for row in rows} == dict.fromkeys(sites, "applied")
            assert all(row.reason for row in rows)
        assert not report.find(state="off", flag="moe")

    @pytest.mark.parametrize("chosen", ["eager", "batched_mm", "grouped_mm"])
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_any_implementation(self, bench: Bench, chosen: str, when: str) -> None:
        """What the user chose before patching is replaced; what is chosen afterwards runs, and the report says so."""
        attention = self.attentions[0]
        model = bench.build(attention)
        if when == "before":
            model.set_experts_implementation(chosen)
        bench.apply(model)
        if when == "after":
            if chosen == "batched_mm":
                pytest.skip("trains from Transformers 5.10 only")
            model.set_experts_implementation(chosen)
        got = vmap_gradients(model, bench.batch())
        assert_same_gradients(got, bench.reference(attention, "fp32", "right"), LIMITS["fp32"])
        report = patch_report(model)
        assert report is not None
        assert when == "after" or not [each for each in report.fallbacks if each.site.endswith("experts")]

    @pytest.mark.parametrize("flags", [{"grouped_moe": False}, {"moe": False}])
    def test_without(self, bench: Bench, flags: dict[str, bool]) -> None:
        """Dense experts, and Transformers' own."""
        attention = self.attentions[0]
        model = bench.build(attention)
        bench.apply(model, **flags)
        for padding in ("right", "left"):
            with warnings.catch_warnings():
                # a grouped product without a batching rule is looped over
                warnings.filterwarnings("ignore", ".*batching rule", UserWarning)
                got = vmap_gradients(model, bench.batch(padding))
            assert_same_gradients(got, bench.reference(attention, "fp32", padding), LIMITS["fp32"])

    @pytest.mark.parametrize("padding", ["right", "left", "none"])
    def test_router_loss(self, bench: Bench, padding: str) -> None:
        """The auxiliary loss is that of each row, as Transformers computes it for the row alone."""
        attention = self.attentions[0]
        stock, model = bench.build(attention), bench.build(attention)
        if not hasattr(stock.config, "router_aux_loss_coef"):
            pytest.skip(f"{self.model_type} has no auxiliary loss")
        for each in (stock, model):
            # large enough to be seen
            vars(each)["router_aux_loss_coef"] = 3.0
        rows: dict[str, Any] = bench.batch(padding)
        try:
            want = model_loop_gradients(stock, **rows, output_router_logits=True)
        except AttributeError as error:
            pytest.skip(f"the stock model records no router logits: {error}")
        bench.apply(model)
        got = vmap_gradients(model, rows, output_router_logits=True)
        assert_same_gradients(got, want, LIMITS["fp32"])

    def test_other_activation(self, bench: Bench) -> None:
        given = self.config if isinstance(self.config, Mapping) else None
        if given is None:
            pytest.skip("the suite has a config of its own")
        built = [
            tiny_model(self.model_type, attention=self.attentions[0], **{**given, "hidden_act": "gelu"}) for _ in "ab"
        ]
        for model in built:
            self.settle(model)
        bench.apply(built[0])
        rows = bench.batch()
        got = vmap_gradients(built[0], rows)
        assert_same_gradients(got, model_loop_gradients(built[1], **rows), LIMITS["fp32"])

    def test_frozen_experts(self, bench: Bench) -> None:
        attention = self.attentions[0]
        stock, model = bench.build(attention), bench.build(attention)
        for each in (stock, model):
            for name in stacks(each):
                each.get_parameter(name).requires_grad_(False)
        bench.apply(model)
        rows = bench.batch()
        got = vmap_gradients(model, rows)
        assert not set(got) & set(stacks(model))
        assert_same_gradients(got, model_loop_gradients(stock, **rows), LIMITS["fp32"])

    @pytest.mark.parametrize("padding", ["right", "left"])
    def test_adapted_experts(self, bench: Bench, padding: str) -> None:
        """LoRA on stacked experts and routers: per example, and in an ordinary forward and backward."""
        stock, rows = with_expert_lora(bench.build(self.attentions[0])), bench.batch(padding)
        try:
            stock(**rows)
        except AttributeError as error:
            pytest.skip(f"the stock model does not run with an adapted router: {error}")
        model = copy.deepcopy(stock)
        bench.apply(model)
        got = vmap_gradients(model, rows)
        assert got
        assert all("lora_" in name for name in got)
        assert_same_gradients(got, model_loop_gradients(stock, **rows), LIMITS["fp32"])
        assert_close(model(**rows).logits, stock(**rows).logits)
        assert_same_gradients(batch_gradients(model, **rows), batch_gradients(stock, **rows), LIMITS["fp32"])

    def test_adapted_experts_hold_no_stack(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        """The sum of a stack and its adapter is never formed."""
        model = bench.build(self.attentions[0])
        model = with_expert_lora(model, stacks(model))
        bench.apply(model)
        wrappers = [m for m in model.modules() if getattr(m, "parameter_name", "") in ("gate_up_proj", "down_proj")]
        assert wrappers
        for wrapper in wrappers:
            vars(wrapper)["get_delta_weight"] = lambda *_: pytest.fail("a whole stack was made")
        vmap_gradients(model, bench.batch())
        model(**bench.batch())
        assert hf.experts_name(wrappers[0].get_base_layer()) == "opake"
