"""The language-model head: a loss straight from hidden states, and what the engines need of it."""

from .wrapper import deferred_logits, supports_loss_only

__all__ = ["deferred_logits", "supports_loss_only"]
