"""What kind of work a LoRA layer does in a decoder: projects into attention, out of it, in an MLP, or embeds.

Told from where it stands, not from the model's name: any family is served, those without a plugin too. Vision and audio
towers of composite models are left out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from opake.lora.layers import is_lora, is_parameter
from opake.rows import gated_mlp

from .originals import OUTPUTS, QKV

MIXERS = re.compile(r"attention|attn|deltanet|mixer|mamba|ssm|recurrent|lru|shortconv", re.IGNORECASE)
IN_A_LAYER = re.compile(r"\.\d+\.")


def decoder_of(model: Any) -> nn.Module:
    """The text decoder of a model; the model itself where it has no other part."""
    probe = getattr(model, "get_decoder", None)
    if probe is None:
        return model
    try:
        found = probe()
    except (AttributeError, NotImplementedError):
        return model
    return found if isinstance(found, nn.Module) else model


def modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name in `model`, module) of everything in the layers of its decoder."""
    inside = {id(module) for module in decoder_of(model).modules()}
    for name, module in model.named_modules():
        if id(module) in inside and IN_A_LAYER.search(f".{name}."):
            yield name, module


def mixes_tokens(module: nn.Module) -> bool:
    """Whether this is an attention, or what a layer has in its place."""
    return MIXERS.search(type(module).__name__) is not None


def projections(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(name, module, kind) of every LoRA layer; kind is `qkv`, `o` or `mlp`."""
    owners = dict(model.named_modules())
    for name, module in modules(model):
        if is_lora(module) and not is_parameter(module) and not is_embedding(module):
            owner, _, last = name.rpartition(".")
            if mixes_tokens(owners[owner]):
                yield name, module, "o" if last in OUTPUTS else "qkv"
            else:
                yield name, module, "mlp"


def attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every attention with separate projections of query, key and value."""
    for name, module in modules(model):
        if all(each in module._modules for each in QKV):
            yield name, module


def mlps(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every gated MLP, experts' and shared ones included, as long as they are modules."""
    for name, module in modules(model):
        if gated_mlp.projections(module) is not None:
            yield name, module


def embeddings(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every LoRA embedding outside vision and audio towers."""
    inside = {id(module) for module in decoder_of(model).modules()}
    for name, module in model.named_modules():
        if id(module) in inside and is_embedding(module):
            yield name, module


def is_embedding(module: object) -> bool:
    """Whether this is exactly PEFT's LoRA around an embedding."""
    layer = sys.modules.get("peft.tuners.lora.layer")
    return layer is not None and type(module) is layer.Embedding
