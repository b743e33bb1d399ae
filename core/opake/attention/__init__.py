"""Attention under transforms: folded fused calls, an exact mathematical path, and the public Transformers interface."""
