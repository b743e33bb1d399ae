"""Tensors without data: every op gives shapes and dtypes on the meta device, forward and backward, Triton or not."""

import pytest
import torch

from opake.patches import kernels as K

X, W, V = (2, 3, 8), (6, 8), (8,)
OPS = {
    "swiglu": (K.opake_swiglu, [X, X], X),
    "geglu_exact": (K.opake_geglu_exact, [X, X], X),
    "geglu_approx": (K.opake_geglu_approx, [X], (2, 3, 4)),
    "relu_squared": (K.opake_relu_squared, [X], X),
    "rms_norm": (K.opake_rms_norm, [X, V], X),
    "fused_add_rms_norm": (lambda *t: K.opake_fused_add_rms_norm(*t)[0], [X, X, V], X),
    "lora_w": (lambda x, w, a, b: K.opake_lora_w(x, w, a, b, 2.0), [X, W, (8, 2), (2, 6)], (2, 3, 6)),
    "attention": (lambda q: K.opake_attention(q, q, q, causal=True), [(2, 2, 3, 8)], (2, 2, 3, 8)),
}


def _meta(shape, dtype):
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes(dtype, name):
    op, shapes, expected = OPS[name]
    arguments = [_meta(shape, dtype) for shape in shapes]
    out = op(*arguments)
    assert (out.shape, out.dtype, out.device.type) == (expected, dtype, "meta")
    gradients = torch.autograd.grad(out, arguments, torch.empty_like(out))
    assert [g.shape for g in gradients] == [torch.Size(shape) for shape in shapes]


def test_rope():
    table = torch.empty(3, 8, device="meta")
    q, k = K.opake_rope_qk(_meta((2, 4, 3, 8), torch.float32), _meta((2, 1, 3, 8), torch.float32), table, table)
    assert (q.shape, k.shape) == ((2, 4, 3, 8), (2, 1, 3, 8))


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("trainable", [False, True])
def test_losses(trainable, reduction):
    hidden, weight = _meta(X, torch.bfloat16), _meta(W, torch.bfloat16).detach().requires_grad_(trainable)
    labels = torch.empty(X[:-1], dtype=torch.long, device="meta")
    for loss in (
        K.opake_linear_cross_entropy_loss(hidden, weight, labels, reduction=reduction),
        K.opake_cross_entropy_loss(hidden @ weight.t(), labels, reduction=reduction),
    ):
        assert (loss.shape, loss.dtype) == (X[:-1] if reduction == "none" else (), torch.float32)
        wanted = [hidden, weight][: 1 + trainable]
        gradients = torch.autograd.grad(loss, wanted, torch.empty_like(loss))
        assert [g.shape for g in gradients] == [t.shape for t in wanted]
