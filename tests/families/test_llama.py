"""Llama and what is stored under its name."""

from __future__ import annotations

from opake.testing import FamilySuite


class TestLlama(FamilySuite):
    model_type = "llama"


class TestDeepSeekCoder(FamilySuite):
    """Linear scaling of positions, as many key heads as query heads."""

    model_type = "llama"
    config = {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 4.0},
        "num_key_value_heads": 4,
    }


class TestDenseMellum(FamilySuite):
    """Tied embeddings, sizes that are no powers of two."""

    model_type = "llama"
    config = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6, "tie_word_embeddings": True}


class TestLlamaBiases(FamilySuite):
    """A bias on every projection, and an activation that is not the usual one."""

    model_type = "llama"
    config = {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}


class TestLlamaDynamic(FamilySuite):
    """The sequence is longer than the table, so that the frequencies are stretched."""

    model_type = "llama"
    causal = False
    config = {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        "max_position_embeddings": 8,
    }


class TestLlamaYarn(FamilySuite):
    model_type = "llama"
    config = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}}


class TestLlama3(FamilySuite):
    model_type = "llama"
    config = {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    }
