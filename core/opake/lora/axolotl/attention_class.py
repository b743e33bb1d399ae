"""`get_attention_cls_from_config`: the attention class of a model that is not loaded yet.

By Transformers' naming convention where that holds; else by building the model without weights and looking. Of a
composite model it is the class of the text part.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import torch
from torch import nn

from opake.errors import AttentionClassNotFound

from .originals import COMBINED, OUTPUTS
from .settings import base_model, setting

SUFFIXES = re.compile(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel|GenerationDecoder)$")


def get_attention_cls_from_config(cfg: Any) -> type[nn.Module]:
    """The class of the attention modules of `cfg.base_model`.

    cfg: a mapping or an object with base_model and, for models whose code comes with them, trust_remote_code

    Raises:
        InputError (a ValueError): no base_model.
        AttentionClassNotFound (a ValueError and an ImportError): the model's code is not there, or has no such class.
    """
    import transformers

    name, trust = base_model(cfg), bool(setting(cfg, "trust_remote_code"))
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust)
    except (ValueError, KeyError) as error:
        raise AttentionClassNotFound(_message(name, f"its config cannot be read: {error}")) from error
    text = _text_config(config)
    if trust and getattr(config, "auto_map", None):
        return _by_building(name, config, trust)
    return _by_name(text.model_type) or _by_building(name, text, trust)


def _text_config(config: Any) -> Any:
    probe = getattr(type(config), "get_text_config", None)
    return config.get_text_config() if probe is not None else config


def _by_name(model_type: str) -> type[nn.Module] | None:
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    module = model_type_to_module_name(model_type)
    if causal is None:
        return None
    try:
        modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    except ImportError:
        return None
    first = causal if isinstance(causal, str) else causal[0]
    found = getattr(modeling, SUFFIXES.sub("", first) + "Attention", None)
    return found if isinstance(found, type) and issubclass(found, nn.Module) else None


def _by_building(name: str, config: Any, trust: bool) -> type[nn.Module]:
    from transformers import AutoModelForCausalLM, PreTrainedConfig

    kind = getattr(config, "model_type", type(config).__name__)
    if not isinstance(config, PreTrainedConfig):
        raise AttentionClassNotFound(_message(name, f"no attention class is known for model_type {kind!r}"))
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
    except Exception as error:
        raise AttentionClassNotFound(
            _message(name, f"a model of model_type {kind!r} cannot be built: {type(error).__name__}: {error}")
        ) from error
    for module in model.modules():
        if re.search("attention|attn", type(module).__name__, re.IGNORECASE) and _projects(module):
            return type(module)
    raise AttentionClassNotFound(_message(name, f"{type(model).__name__} has no attention with projections"))


def _projects(module: nn.Module) -> bool:
    names = module._modules.keys()
    return bool(names & set(OUTPUTS)) and bool(names & {"q_proj", "k_proj", *COMBINED} or len(names) > 1)


def _message(name: str, reason: str) -> str:
    return (
        f"no attention class for base_model {name!r}: {reason}. Leave lora_qkv_kernel and lora_o_kernel off, or patch "
        "the loaded model with apply_lora_kernel_patches(model, cfg), which needs no class"
    )
