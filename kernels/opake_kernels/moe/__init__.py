"""Mixture of experts: one op with three paths (dense, grouped, fused) behind it."""

from .choice import NAMES_OF_PATHS, Choice, choose
from .op import opake_moe
from .reference import moe_reference

__all__ = ["NAMES_OF_PATHS", "Choice", "choose", "moe_reference", "opake_moe"]
