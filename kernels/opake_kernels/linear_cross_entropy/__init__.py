"""Cross-entropy of a linear head straight from hidden states, plain and per example, without a logit left alive."""

from .op import linear_cross_entropy_reference, opake_linear_cross_entropy_loss

__all__ = ["linear_cross_entropy_reference", "opake_linear_cross_entropy_loss"]
