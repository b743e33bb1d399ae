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

from .made import attributes_made, projects_in
from .originals import OUTPUTS
from .settings import base_model, setting
from .sites import decoder_of

ATTENTION = re.compile(r"attention|attn|MLA$", re.IGNORECASE)
SUFFIXES = re.compile(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel|GenerationDecoder)$")


def get_attention_cls_from_config(cfg: Any) -> type[nn.Module]:
    """The class of the attention modules of `cfg.base_model`.

    cfg: a mapping or an object with base_model and, for models whose code comes with them, trust_remote_code

    Raises:
        InputError (a ValueError): no base_model.
        AttentionClassNotFound (a ValueError and an ImportError): its config or code is not there, or has no such class.
    """
    import transformers

    name, trust = base_model(cfg), bool(setting(cfg, "trust_remote_code"))
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust)
    except (ValueError, KeyError, OSError) as error:
        raise AttentionClassNotFound(_message(name, f"its config cannot be read: {error}")) from error
    named = None
    if not (trust and getattr(config, "auto_map", None)):
        named = _by_name(_text_type(config))
        if named is not None and projects_in(named):
            return named
    try:
        return _by_building(name, config, trust)
    except AttentionClassNotFound:
        if named is None:
            raise
        return named


def _text_type(config: Any) -> str:
    """The model type of the text part of a model."""
    if hasattr(type(config), "get_text_config"):
        return config.get_text_config(decoder=True).model_type
    return config.model_type


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
    stem = SUFFIXES.sub("", first)
    found = (getattr(modeling, f"{stem}{middle}Attention", None) for middle in ("", "Text"))
    return next((cls for cls in found if isinstance(cls, type) and issubclass(cls, nn.Module)), None)


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
    kinds = dict.fromkeys(type(module) for module in decoder_of(model).modules())
    found = [kind for kind in kinds if ATTENTION.search(kind.__name__) and projects_in(kind)]
    if found:
        # some models have small attentions beside the one that counts, without an output projection
        return next((kind for kind in found if attributes_made(kind) & set(OUTPUTS)), found[0])
    raise AttentionClassNotFound(_message(name, f"{type(model).__name__} has no attention with projections"))


def _message(name: str, reason: str) -> str:
    return (
        f"no attention class for base_model {name!r}: {reason}. Leave lora_qkv_kernel and lora_o_kernel off, or patch "
        "the loaded model with apply_lora_kernel_patches(model, cfg), which needs no class"
    )
