"""Several sequences packed in one row, told apart by their positions, without looking at a value."""

from __future__ import annotations

import torch


def sequence_numbers(position_ids: torch.Tensor) -> torch.Tensor:
    """Which sequence of its row each token belongs to: position_ids (B, T) -> (B, T), 0 for the first.

    A sequence begins wherever a position does not follow the one before it.
    """
    before = torch.cat([position_ids[:, :1] - 1, position_ids[:, :-1]], dim=-1)
    return (position_ids - before != 1).cumsum(-1)
