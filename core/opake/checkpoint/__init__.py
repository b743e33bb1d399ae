"""Rematerialisation that works inside functorch transforms, where `torch.utils.checkpoint` cannot."""

from __future__ import annotations

from opake.checkpoint.guard import RematCheckpoint, guarded_checkpoint
from opake.checkpoint.policy import Selected, selective_checkpointing
from opake.checkpoint.rematerialise import remat

__all__ = ["RematCheckpoint", "Selected", "guarded_checkpoint", "remat", "selective_checkpointing"]
