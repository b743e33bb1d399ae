"""What `opake train` does: private LoRA fine-tuning of a causal language model on a file of texts."""

from .run import Plan, run

__all__ = ["Plan", "run"]
