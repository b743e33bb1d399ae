"""Sizes that cannot be derived from a config class: model types whose config refuses, misses or contradicts the rest.

Each entry is set over the derived sizes, nested configs included. A reason stands where it is not the obvious one:
sizes that belong together. What is derived for every other model type is in `tiny`.
"""

from __future__ import annotations

from typing import Any

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_BLT = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 48}
_DOTS3 = {"head_dim": 16, "per_layer_config": {}}
_QWEN4 = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
}
_IMAGE = {"image_token_id": 1, "image_token_index": 1}

OVERRIDES: dict[str, dict[str, Any]] = {
    # a hybrid of two layers needs its attention layer within them
    "bamba": {"attn_layer_indices": [1]},
    # random attention between blocks of 64 tokens needs rows that are not tiny
    "big_bird": {"attention_type": "original_full"},
    "blt": {
        "encoder_hash_byte_group_size": [3],
        "encoder_hash_byte_group_vocab": 50,
        "patcher_config": {**_BLT, "num_hidden_layers": 1, "vocab_size": 97},
        "encoder_config": {**_BLT, "hidden_size_global": 32, "num_hidden_layers": 1, "vocab_size": 97},
        "decoder_config": {**_BLT, "hidden_size_global": 32, "num_hidden_layers": 1, "vocab_size": 97},
        "global_config": {**_BLT, "num_hidden_layers": 1},
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "dory": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp", "sliding_attention", "mlp"],
        "n_input_layers": 2,
        "n_recurrent_layers": 2,
        "n_output_layers": 2,
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dots3_note_text": _DOTS3,
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8},
    # real checkpoints have the image token inside their vocabulary, so that no id is looked at
    "gemma3": _IMAGE,
    "gemma4": _IMAGE,
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "intermediate_size": [48, 48],
        "activation_sparsity_pattern": [0.5, 0.0],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "n_groups": 1, "chunk_size": 8},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {
        "hash_seed": 0,
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds": False,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 2,
        "attention_head_size": 8,
        "feed_forward_size": 48,
    },
    "roc_bert": {
        "pronunciation_vocab_size": 97,
        "shape_vocab_size": 97,
        "pronunciation_embed_dim": 8,
        "shape_embed_dim": 8,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "use_mamba_kernels": False,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "zaya": {"num_experts_per_tok": 1},
}
