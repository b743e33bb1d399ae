"""Patch Transformers models for per-example gradients and fused kernels: apply, report, restore."""

from opake.patching.engine import apply_model_patches, patch_report, patched, restore
from opake.patching.report import Fallback, PatchReport, Row
from opake.patching.runtime import apply_runtime_patches, is_runtime_patched, restore_runtime

__all__ = [
    "Fallback",
    "PatchReport",
    "Row",
    "apply_model_patches",
    "apply_runtime_patches",
    "is_runtime_patched",
    "patch_report",
    "patched",
    "restore",
    "restore_runtime",
]
