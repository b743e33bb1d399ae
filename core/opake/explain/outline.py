"""A model without weights: its config from a directory, a file or a name, and its modules on the meta device."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from opake.checking.adapters import with_adapters
from opake.checking.sweep import quiet
from opake.errors import InputError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

# characters of somebody else's message
LONGEST = 300


def config_of(model: str) -> PreTrainedConfig:
    """The config of a directory, of a JSON file, or of a name that Transformers knows.

    Raises InputError, with what Transformers said, where there is none, or one that it refuses. Code that a model
    brings along is not run, nor is anybody asked whether to run it.
    """
    from transformers import AutoConfig

    if model.endswith(".json") and not Path(model).is_file():
        raise InputError(f"there is no file {model!r}; give a directory, a config.json or a name on the hub")
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    # a config is anybody's file: validators, parsers and constructors each raise what they like
    except Exception as error:
        raise InputError(
            f"no config of a model that the installed Transformers knows at {model!r}: {_said(error)};"
            " give a directory, a config.json or a name on the hub"
        ) from error


def outline(config: PreTrainedConfig, rank: int, dtype: str) -> nn.Module:
    """The causal language model of a config on the meta device, with LoRA of a rank on all linear layers (0: none).

    Raises InputError, with what was said, where Transformers or PEFT makes no model of it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with quiet(), warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), trust_remote_code=False)
            return with_adapters(model, r=rank) if rank else model
        except Exception as error:
            raise InputError(
                f"no causal language model can be made of this config of model_type {config.model_type!r}:"
                f" {_said(error)}"
            ) from error


def _said(error: Exception) -> str:
    """The kind of an error and its text in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= LONGEST else text[:LONGEST] + ' ...'}"
