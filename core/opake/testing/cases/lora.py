"""Cases with adapters: a PEFT LoRA on every linear layer, plain, frozen below, checkpointed and merged."""

# ruff: noqa: TID253
from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from opake.patches import restore
from opake.testing.oracle import model_loop_gradients
from opake.testing.snapshot import differences, imported, library_snapshot, model_snapshot
from opake.testing.switch import checkpointing
from opake.testing.vmapped import vmap_gradients

from .base import LIMITS, Suite, assert_close, assert_same_gradients

if TYPE_CHECKING:
    from opake.testing.workbench import Bench


def unusual(model: torch.nn.Module) -> list[str] | None:
    """Names of linear layers that compute something else than their base class, which PEFT takes no notice of."""
    plain = torch.nn.Linear
    found = [name for name, m in model.named_modules() if isinstance(m, plain) and type(m).forward is not plain.forward]
    return found or None


def with_lora(model: Any, **options: Any) -> Any:
    """`model` with a LoRA of rank 4 on every linear layer but the head, both factors random."""
    from peft import LoraConfig, get_peft_model

    options.setdefault("exclude_modules", unusual(model))
    config = LoraConfig(r=4, lora_alpha=2, target_modules="all-linear", init_lora_weights=False, **options)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        # PEFT asks a deprecated name of Transformers, and says that it turned its switch for transposed weights
        warnings.simplefilter("ignore")
        torch.manual_seed(3)
        adapted = get_peft_model(model, config).train()
        _require_it_runs(adapted)
    return adapted


def _require_it_runs(adapted: Any) -> None:
    """Skip where PEFT wraps the parameters of a module whose other attributes the stock model reads."""
    if not any(type(module).__name__ == "ParamWrapper" for module in adapted.modules()):
        return
    try:
        with torch.no_grad():
            adapted(input_ids=torch.tensor([[1, 2]]))
    except AttributeError as error:
        pytest.skip(f"the stock model does not run with an adapted router: {error}")


class LoraCases(Suite):
    @pytest.mark.parametrize("padding", ["right", "left"])
    @pytest.mark.parametrize("state", ["keep", "ckpt"])
    @pytest.mark.parametrize("shape", ["T", "1xT"])
    def test_lora_gradients(self, bench: Bench, attention: str, padding: str, state: str, shape: str) -> None:
        stock = with_lora(bench.build(attention))
        model = copy.deepcopy(stock)
        bench.apply(model)
        rows = bench.batch(padding)
        with checkpointing(model, state == "ckpt"):
            got = vmap_gradients(model, rows, shape=shape)
        assert got
        assert all("lora_" in name for name in got)
        assert_same_gradients(got, model_loop_gradients(stock, **rows), LIMITS["fp32"])

    def test_lora_leaks_nothing(self, bench: Bench, attention: str) -> None:
        model = with_lora(bench.build(attention))
        # once before looking: lazy modules load, and copies leave their marks on classes
        bench.apply(model)
        vmap_gradients(model, bench.batch())
        restore(model)
        modules = imported()
        library, before = library_snapshot(modules), model_snapshot(model)
        bench.apply(model)
        vmap_gradients(model, bench.batch())
        assert list(differences(library, library_snapshot(modules))) == []
        restore(model)
        assert list(differences(before, model_snapshot(model))) == []

    def test_lora_forward_and_generate(self, bench: Bench, attention: str) -> None:
        stock = with_lora(bench.build(attention)).eval()
        model = copy.deepcopy(stock)
        bench.apply(model)
        rows = bench.batch("left")
        assert_close(model(**rows).logits, stock(**rows).logits)
        rows.pop("labels")
        fixed = {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None}
        assert torch.equal(model.generate(**rows, **fixed), stock.generate(**rows, **fixed))
        with model.disable_adapter():
            assert_close(model(**rows).logits, bench.stock(attention).eval()(**rows).logits)
