"""Attention of a whole microbatch in one call, at any nesting of vmap and grad."""

from .math import attention_reference
from .op import opake_attention

__all__ = ["attention_reference", "opake_attention"]
