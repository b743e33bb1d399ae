"""Attention masks that are made from shapes and from what the caller supplied, never from what the mask says."""
