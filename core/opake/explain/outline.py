"""A model without weights: its config from a directory, a file or a name, and its modules on the meta device."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opake.checking.sweep import quiet
from opake.errors import InputError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig


def config_of(model: str) -> PreTrainedConfig:
    """The config of a directory, of a `config.json`, or of a name that Transformers knows.

    Raises InputError, with what Transformers said, where there is none.
    """
    from transformers import AutoConfig

    where = Path(model)
    try:
        return AutoConfig.from_pretrained(str(where.parent) if where.name.endswith(".json") else model)
    except (OSError, ValueError, KeyError) as error:
        text = str(error).strip().partition("\n")[0]
        raise InputError(
            f"no config of a model that the installed Transformers knows at {model!r}: {text};"
            " give a directory, a config.json or a name on the hub"
        ) from None


def outline(config: PreTrainedConfig, rank: int, dtype: str) -> nn.Module:
    """The causal language model of a config on the meta device, with LoRA of a rank on all linear layers (0: none)."""
    import torch
    from transformers import AutoModelForCausalLM

    with quiet(), warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        except ValueError as error:
            text = str(error).partition("\n")[0]
            raise InputError(f"{config.model_type!r} is no causal language model of Transformers: {text}") from None
        return _adapted(model, rank) if rank else model


def _adapted(model: Any, rank: int) -> nn.Module:
    """Adapters on plain linear layers: those that PEFT calls all-linear, without routers and the head."""
    from peft import LoraConfig, get_peft_model
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    from opake import hf

    head = hf.output_embeddings(model)
    plain = (
        name for name, module in model.named_modules() if type(module) in (nn.Linear, Conv1D) and module is not head
    )
    return get_peft_model(model, LoraConfig(r=rank, target_modules=list(plain), task_type="CAUSAL_LM"))  # type: ignore[return-value]
