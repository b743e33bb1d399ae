"""Rematerialisation that works inside functorch transforms, where `torch.utils.checkpoint` cannot."""

from __future__ import annotations

from opake.checkpoint.guard import RematCheckpoint, guarded_checkpoint
from opake.checkpoint.rematerialise import remat

__all__ = ["RematCheckpoint", "guarded_checkpoint", "remat"]
