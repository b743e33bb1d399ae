"""Turning lists of rows into batches: empty batches, and right padding without a mask."""

from .right import RightPaddingCollator

__all__ = ["RightPaddingCollator"]
