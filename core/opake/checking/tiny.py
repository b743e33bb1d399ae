"""A tiny random model of any causal language model family, its sizes derived from the config class alone.

Every size that the config has under a known name is set to one consistent small geometry; kinds of layers keep their
first order of appearance, so that a hybrid stays a hybrid. Parameters are moved away from their initial values: a norm
whose weight is 1, or a bias of 0, would hide a wrong formula. Weights and texts of real checkpoints are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from opake.checking.peculiar import OVERRIDES
from opake.errors import InputError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

VOCABULARY = 97
TOKENS = 12
LARGEST = 10_000_000

# one geometry: hidden 32 = 4 heads of 8, window shorter than TOKENS, 4 experts of which 2 are used
_SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "word_embed_proj_dim", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "index_n_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_chunk_size", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "qk_head_dim"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "mamba_n_groups", "first_k_dense_replace"), 1),
    **dict.fromkeys(("num_nextn_predict_layers",), 0),
    "vocab_size_per_layer_input": VOCABULARY,
    "sliding_window": 6,
    "index_topk": 4,
    "rotary_dim": 8,
}
_DEPTH = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_TOKENS: dict[str, int] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# None in these means "derived from the sizes above", so a derived value may stand there as well
_DERIVED = ("head_dim", "num_key_value_heads", "num_experts_per_tok")
_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types")


def tiny_config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """The smallest useful config of a causal language model's `model_type`, dropout zero; `overrides` are set last.

    A number of layers among them repeats the kinds of layers that the tiny config has.

    Raises InputError where the installed Transformers does not know the model type or refuses the derived sizes: then
    pass the sizes that it misses as overrides, or build a config by hand.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise InputError(f"the installed Transformers has no model_type {model_type!r}")
    cls = CONFIG_MAPPING[model_type]
    try:
        return cls(**_merged(_merged(_shrunk(cls()), OVERRIDES.get(model_type, {})), overrides))
    except Exception as error:
        raise InputError(
            f"{cls.__name__} refuses the tiny sizes derived for it: {type(error).__name__}: {error};"
            " pass the right ones as overrides"
        ) from error


def tiny_model(
    model_type: str | PreTrainedConfig, *, attention: str | None = None, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """A random causal language model in training mode, float32 on the CPU, every parameter away from its initial value.

    model_type: a model type, or a config that is used as it is
    attention: the attention implementation; None is Transformers' choice, but eager where SDPA would drop a softcap
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = tiny_config(model_type, **overrides) if isinstance(model_type, str) else model_type
    if isinstance(model_type, str) and hasattr(config, "is_decoder"):
        # an encoder such as BERT is a causal language model only as a decoder
        config.is_decoder = overrides.get("is_decoder", True)
    if attention is None and getattr(config, "attn_logit_softcapping", None):
        attention = "eager"
    chosen = {"attn_implementation": attention} if attention else {}
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config, **chosen).parameters())
    if size > LARGEST:
        raise InputError(f"the config derived for {config.model_type!r} has {size:,} parameters, not tiny; pass sizes")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, **chosen)
        _randomise(model)
    return model.train()


def tiny_batch(rows: int = 3, tokens: int = TOKENS, padding: str = "right", seed: int = 1) -> dict[str, torch.Tensor]:
    """Rows of different lengths: `input_ids`, `labels` (-100 on padding) and `attention_mask`, each (rows, tokens).

    padding: `right`, `left`, or `none` for full rows without an attention mask. The first row is full in any case.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(len(_TOKENS), VOCABULARY, (rows, tokens), generator=generator)
    if padding == "none":
        return {"input_ids": ids, "labels": ids.clone()}
    missing = torch.arange(rows)[:, None] * 2 % (tokens - 1)
    position = torch.arange(tokens) if padding == "left" else torch.arange(tokens).flip(0)
    mask = position >= missing
    ids = ids.masked_fill(~mask, _TOKENS["pad_token_id"])
    return {"input_ids": ids, "labels": ids.masked_fill(~mask, -100), "attention_mask": mask.long()}


def _shrunk(config: PreTrainedConfig) -> dict[str, Any]:
    """Keyword arguments that make a config of the same class tiny."""
    have = config.to_dict()
    small: dict[str, Any] = {}
    for name, value in _SIZES.items():
        key = config.attribute_map.get(name, name)
        if key in have and (have[key] is not None or name in _DERIVED):
            small[key] = value
    small |= {name: value for name, value in _TOKENS.items() if name in have}
    small |= {name: 0.0 for name, value in have.items() if isinstance(value, float) and _is_dropout(name)}
    if "qk_nope_head_dim" in small:
        # latent attention expands keys and values to one head for each query head
        small["num_key_value_heads"] = small.get("num_attention_heads", 4)
    small |= _layers(config, have)
    for name in getattr(config, "sub_configs", {}):
        if have.get(name):
            small[name] = _shrunk(getattr(config, name))
    return small


def _merged(sizes: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` set over `sizes`, entry by entry where both have a nested config."""
    nested = {key: _merged(sizes[key], value) for key, value in over.items() if _is_config(sizes.get(key), value)}
    return {**sizes, **kinds_at_depth(sizes, over), **over, **nested}


def kinds_at_depth(have: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """The kinds of layers in the settings `have`, repeated or cut for the number of layers in `over`, if it has one."""
    count = next((over[name] for name in _DEPTH if isinstance(over.get(name), int)), None)
    return {} if count is None else {name: _cycled(have[name], count) for name in _KINDS if have.get(name)}


def _is_config(before: Any, over: Any) -> bool:
    return isinstance(before, dict) and isinstance(over, dict)


def _layers(config: PreTrainedConfig, have: dict[str, Any]) -> dict[str, Any]:
    """Each kind of layer once, in the order in which the full model has them, and at least two layers."""
    kinds = {name: list(dict.fromkeys(have[name])) for name in _KINDS if isinstance(have.get(name), list | tuple)}
    kinds = {name: each for name, each in kinds.items() if each}
    if not kinds:
        return {}
    count = max(2, *(len(each) for each in kinds.values()))
    key = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    return {key: count, **{name: _cycled(each, count) for name, each in kinds.items()}}


def _cycled(kinds: list[Any], count: int) -> list[Any]:
    return [kinds[i % len(kinds)] for i in range(count)]


def _is_dropout(name: str) -> bool:
    return "dropout" in name or name.endswith(("_pdrop", "layerdrop"))


def _randomise(model: PreTrainedModel) -> None:
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            if parameter.dim() == 1:
                parameter.add_(noise, alpha=0.1)
            else:
                parameter.copy_(noise).mul_(0.15)
