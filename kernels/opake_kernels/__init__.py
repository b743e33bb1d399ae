"""Fused Triton ops with a plain PyTorch twin each; they know nothing about models."""
