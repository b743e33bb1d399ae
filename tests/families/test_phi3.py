"""Phi-3: combined projections, and every kind of rotary table that its checkpoints have."""

from __future__ import annotations

from opake.testing import FamilySuite


class TestPhi3(FamilySuite):
    model_type = "phi3"
    config = {"sliding_window": 6}


class TestPhi4Mini(FamilySuite):
    """Half of each head is rotated."""

    model_type = "phi3"
    config = {
        "hidden_size": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "tie_word_embeddings": True,
    }


class TestPhi3LongRope(FamilySuite):
    """The sequence is longer than the original table, so that the long factors are used."""

    model_type = "phi3"
    causal = False
    config = {
        "max_position_embeddings": 32,
        "original_max_position_embeddings": 8,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.5, 2.0, 3.0, 4.0],
            "original_max_position_embeddings": 8,
        },
    }
