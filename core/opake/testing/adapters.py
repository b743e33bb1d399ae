"""A PEFT LoRA on every linear layer of a model, for the tests of one."""

# ruff: noqa: TID253
from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch


def unusual(model: torch.nn.Module) -> list[str] | None:
    """Names of linear layers that compute something else than their base class, which PEFT takes no notice of."""
    plain = torch.nn.Linear
    found = [name for name, m in model.named_modules() if isinstance(m, plain) and type(m).forward is not plain.forward]
    return found or None


def with_lora(model: Any) -> Any:
    """`model` with a LoRA of rank 4 on every linear layer but the head, both factors random."""
    from peft import LoraConfig, get_peft_model

    but = unusual(model)
    config = LoraConfig(r=4, lora_alpha=2, target_modules="all-linear", exclude_modules=but, init_lora_weights=False)
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
