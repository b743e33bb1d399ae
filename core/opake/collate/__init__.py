"""Turning lists of rows into batches: empty batches, right padding without a mask, microbatches of one size."""

from .microbatches import LogicalBatch, Microbatches, Rows
from .needs import needs_mask, padding_right
from .right import RightPaddingCollator

__all__ = ["LogicalBatch", "Microbatches", "RightPaddingCollator", "Rows", "needs_mask", "padding_right"]
