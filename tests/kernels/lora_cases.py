"""Arguments for the tests of the LoRA ops, small enough for the interpreter."""

import torch

TOKENS, HIDDEN, INTER = 9, 24, 40


def numbers(*shape, dtype=torch.float32, device="cpu"):
    return (torch.randn(shape, device=device) * 0.5).to(dtype)


def adapter(n_in, rank, n_out, *, dtype=torch.float32, device="cpu"):
    """A (in, rank) and B (rank, out) as PEFT keeps them, transposed."""
    return numbers(rank, n_in, dtype=dtype, device=device).mT, numbers(n_out, rank, dtype=dtype, device=device).mT


def wide(tensors, rows):
    """Each with an example axis, expanded."""
    return [t.expand(rows, *t.shape) for t in tensors]


def loop(fn, x, params, cotangent):
    """Per-example gradients of `params`, one ordinary backward a row of `x`, in float64."""
    found = []
    for row, ct in zip(x, cotangent, strict=True):
        leaves = [p.detach().double().requires_grad_() for p in params]
        row = row.detach().double().requires_grad_()
        out = fn(row, *leaves)
        out = out if isinstance(out, tuple) else (out,)
        cts = ct if isinstance(ct, tuple) else (ct,)
        found.append(torch.autograd.grad(out, [row, *leaves], [c.double() for c in cts]))
    return [torch.stack(parts) for parts in zip(*found, strict=True)]
