"""Mixture of experts: one op with three paths (dense, grouped, fused) behind it."""

from .choice import NAMES_OF_PATHS, Choice, choose
from .op import moe_reference, opake_moe

__all__ = ["NAMES_OF_PATHS", "Choice", "choose", "moe_reference", "opake_moe"]
