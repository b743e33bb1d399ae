"""Row kernels in place: norms, rotary embeddings, gated MLPs and losses of one model, each on the instance.

What a module computes is found by running its own class on a few small numbers and comparing with the plain twins, so
a family never has to say it and a Transformers upgrade that changes it cannot go unnoticed.
"""
