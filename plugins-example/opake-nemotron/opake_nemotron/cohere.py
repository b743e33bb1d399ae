"""An extension of Command R, whose own family leaves the norm to Transformers: the LayerNorm kernel for it, too.

With `use_qk_norm` the norms of queries and keys have a weight for each head; those stay as they are, with a reason.
"""

from opake.records import hookimpl

from .records import LayerNorm


@hookimpl
def opake_kernel_patches(hf):
    yield LayerNorm(hf.CohereLayerNorm)
