"""opake: exact per-example gradients and fused kernels for Hugging Face Transformers models.

Importing this package imports nothing heavy; the API lives in `opake.patches` and `opake.functional`.
"""

__version__ = "0.1.0"
