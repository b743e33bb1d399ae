"""Models that `opake bench step` builds: a directory, a model type, or the shapes of a public model by name.

Weights are random; the second factor of every adapter is too, because the first has no gradient while it is zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .memory_model import Sizes, check_settings, config_of, unpatched, with_positions

__all__ = ["SHAPES", "build", "config", "sizes_of"]

Settings = Mapping[str, Any]
SHAPES: dict[str, tuple[str, Settings]] = {
    "qwen2-0.5b": (
        "qwen2",
        {
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    "llama-3.2-1b": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-0.6b": (
        "qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3-1b": (
        "gemma3_text",
        {
            "vocab_size": 262144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
        },
    ),
    "smollm2-135m": (
        "llama",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
    ),
}


def config(model: str, settings: Settings, tokens: int) -> Any:
    """The config of a name in `SHAPES`, of a directory, or of a model type; positions for rows of `tokens`."""
    if model in SHAPES:
        from transformers import AutoConfig

        kind, shapes = SHAPES[model]
        check_settings(AutoConfig.for_model(kind), settings)
        made: Any = AutoConfig.for_model(kind, **{**shapes, **settings})
    else:
        made = config_of(model, settings)
    return with_positions(made, tokens)


def sizes_of(model: str, settings: Settings, rows: int, tokens: int, rank: int) -> Sizes:
    """What is measured."""
    return Sizes(config(model, settings, tokens), rows, tokens, rank)


def build(sizes: Sizes, device: str) -> Any:
    """An unpatched PEFT model in training mode: bf16 with float32 adapters on CUDA, float32 elsewhere."""
    model = unpatched(sizes, device)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.02)
    return model
