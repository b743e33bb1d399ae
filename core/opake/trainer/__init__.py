"""Private fine-tuning in the way of Hugging Face: `DPTrainer` is `transformers.Trainer` with DP-SGD inside."""

from opake.trainer.arguments import TrainingArguments
from opake.trainer.trainer import DPTrainer

__all__ = ["DPTrainer", "TrainingArguments"]
