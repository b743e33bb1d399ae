"""The main job on a real model in a few minutes: a short DP-SGD LoRA fine-tuning, checked against a loop."""

from .train import run

__all__ = ["run"]
