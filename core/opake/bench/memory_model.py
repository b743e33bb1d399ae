"""The model that `opake bench memory` measures: random weights by a config, LoRA on every linear layer or none."""

from __future__ import annotations

import copy
import difflib
import gc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from opake.checking.tiny import kinds_at_depth, tiny_config
from opake.errors import InputError

from .memory_trace import LAYER, part_of

WAYS = ("eager", "sdpa", "folded", "remat")
GRADIENTS = "gradients"
# RoBERTa and its kin count positions from behind the id of the padding token
BEHIND_PADDING = 2


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured: a config, rows and tokens of a microbatch, rank of the adapters (0: everything is trained)."""

    config: Any
    rows: int
    tokens: int
    rank: int


def config_of(model: str, overrides: Mapping[str, Any]) -> Any:
    """The config in a directory, with `overrides`; or that of a model type, small wherever `overrides` say nothing.

    Raises InputError for a directory without a config, a model that is no causal language model, and a setting that
    its config does not have.
    """
    from transformers import AutoConfig

    if (Path(model) / "config.json").is_file():
        config = AutoConfig.from_pretrained(model, local_files_only=True)
        check_settings(config, overrides)
        for name, value in {**kinds_at_depth(vars(config), overrides), **overrides}.items():
            setattr(config, name, value)
    elif Path(model).is_dir():
        raise InputError(f"the directory {model} has no config.json; save a model or its config there")
    else:
        config = tiny_config(model, **overrides)
        check_settings(type(config)(), {name: value for name, value in overrides.items() if name in vars(config)})
    _check_causal(config)
    return config


def with_positions(config: Any, tokens: int) -> Any:
    """`config`, with learned positions for rows of `tokens` where it has fewer."""
    text, last = config.get_text_config(), tokens + BEHIND_PADDING
    if getattr(text, "max_position_embeddings", last) < last:
        text.max_position_embeddings = last
    return config


def check_settings(config: Any, overrides: Mapping[str, Any]) -> None:
    """Refuse a setting that `config` does not have: Transformers would keep it, and nothing would read it."""
    for name in overrides:
        if not hasattr(config, name):
            near = difflib.get_close_matches(name, vars(config), n=1, cutoff=0)
            raise InputError(f"{type(config).__name__} has no setting {name!r}; the nearest is {near[0]!r}")


def _check_causal(config: Any) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(f"Transformers has no causal language model for {config.model_type!r}")


def unpatched(sizes: Sizes, device: str, **attention: str) -> Any:
    """The model in training mode with its adapters, if any: on CUDA in bf16, and adapters in float32."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    # a model writes into the config that it is built from
    config = copy.deepcopy(sizes.config)
    config.use_cache = False
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, **attention)
    if sizes.rank:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=sizes.rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model.train()


def build(sizes: Sizes, way: str, device: str) -> Any:
    """A patched model for one way; sdpa: Transformers' attention, not folded."""
    from opake.checkpoint import selective_checkpointing
    from opake.patches import apply_model_patches

    model = unpatched(sizes, device, **({"attn_implementation": "eager"} if way == "eager" else {}))
    apply_model_patches(model, eager_attention=way != "sdpa")
    if way == "remat":
        selective_checkpointing(model)
    return model


def batch(sizes: Sizes, rows: int, device: str) -> dict[str, torch.Tensor]:
    """Rows of full length, without a mask, as `RightPaddingCollator` makes them."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, sizes.config.vocab_size, (rows, sizes.tokens), generator=generator).to(device)
    return {"input_ids": ids, "labels": ids.clone()}


def trainable(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that are trained, by name."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def forget(device: str) -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def floor(sizes: Sizes, rows: int, model: nn.Module, *, remat: bool) -> dict[str, int]:
    """Bytes by part that no exact step can do without, for a dense decoder; an estimate for others.

    Per layer and token: queries, keys, values, output and log-sum-exp of attention; up and, if any, gate of the MLP;
    the residual stream before each norm. Rematerialised: the stream before the layer alone. All these when the backward
    starts. Besides, when it ends: the gradients. Layers whose parts have other names are one part, "activations".
    """
    text = sizes.config.get_text_config()
    H, N = text.hidden_size, text.num_attention_heads
    K = getattr(text, "num_key_value_heads", None) or N
    D = getattr(text, "head_dim", None) or H // N
    chosen = getattr(text, "num_experts_per_tok", None) or 1
    I = (getattr(text, "moe_intermediate_size", None) if chosen > 1 else None) or getattr(
        text, "intermediate_size", 4 * H
    )
    dtype = next(model.parameters()).dtype
    entries = rows * sizes.tokens * text.num_hidden_layers * dtype.itemsize
    gradients = sum(p.numel() * p.element_size() for p in trainable(model).values()) * rows
    if remat:
        return {LAYER: entries * H, GRADIENTS: gradients}
    lse = rows * sizes.tokens * text.num_hidden_layers * 4 * N
    attention, mlp = entries * (2 * N + 2 * K) * D + lse, entries * (1 + _gated(model)) * I * chosen
    return {**_named_as_in(model, {"self_attn": attention, "mlp": mlp, LAYER: entries * 2 * H}), GRADIENTS: gradients}


def _gated(model: nn.Module) -> bool:
    return any("gate_proj" in name or "gate_up" in name for name, _ in model.named_parameters())


def _named_as_in(model: nn.Module, parts: dict[str, int]) -> dict[str, int]:
    """`parts`, or their sum where the layers of `model` have other ones."""
    own = {LAYER, *(part_of(name) for name, _ in model.named_parameters())}
    return parts if parts.keys() <= own else {"activations": sum(parts.values())}
