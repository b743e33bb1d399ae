"""LoRA on every plain linear layer: what PEFT calls all-linear, without routers, other subclasses and the head.

PEFT's own word for it leaves out the dense layers of some mixtures of experts, and wraps linear layers that return more
than one tensor, which then do not run.
"""

from __future__ import annotations

from typing import Any


def with_adapters(model: Any, **options: Any) -> Any:
    """`get_peft_model` with adapters on the plain linear layers of a causal language model; `options` of LoraConfig.

    Raises what PEFT raises where there is no such layer.
    """
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules=plain_linears(model), task_type="CAUSAL_LM", **options))


def plain_linears(model: Any) -> list[str]:
    """The names of the modules that are Linear or Conv1D, no subclass of them, and not the head."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    from opake import hf

    head = hf.output_embeddings(model)
    return [name for name, each in model.named_modules() if type(each) in (nn.Linear, Conv1D) and each is not head]
