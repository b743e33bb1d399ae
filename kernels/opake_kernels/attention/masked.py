"""How a mask travels with the groups that vmap makes."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def fold_mask(mask: torch.Tensor | None, lead: Sequence[int]) -> torch.Tensor | None:
    """(*groups or ones, B or 1, N or 1, T, S) -> (B' or 1, N or 1, T, S); a mask shared by all stays one."""
    if mask is None:
        return None
    if any(size != 1 for size in mask.shape[: len(lead)]):
        mask = mask.expand(*lead, *mask.shape[len(lead) :])
    return mask.flatten(0, len(lead) - 1)
