"""Gated activations: values, gradients, every transform, layouts, refusals."""

import pytest
import torch

from opake_kernels import gated, gated_kernels
from opake_kernels.activations import ACTIVATIONS, Activation
from opake_kernels.gated import (
    gated_reference,
    opake_gated_activation,
    opake_geglu_approx,
    opake_geglu_exact,
    opake_relu_squared,
    opake_swiglu,
)

KINDS = {
    "swiglu": (opake_swiglu, "silu"),
    "exact": (opake_geglu_exact, "gelu"),
    "tanh": (opake_geglu_approx, "gelu_tanh"),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(2, 3, 8), (9, 7, 41), (1, 1), (5,), (), (0, 4), (3, 0), (2, 1, 1)]


def _twin(activation, interleaved=False):
    return lambda *args: gated_reference(*args, activation=activation, interleaved=interleaved)


def _pair(shape, dtype, device, scale=2.0):
    return [(torch.randn(shape, device=device) * scale).to(dtype) for _ in range(2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind, shape, dtype, device, check_op):
    op, name = KINDS[kind]
    check_op(op, _twin(name), _pair(shape, dtype, device), (0, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_every_activation(name, dtype, device, check_op):
    # wide inputs reach the clamp of gpt_oss on both sides
    args = _pair((4, 37), dtype, device, scale=6.0)
    check_op(lambda g, u: opake_gated_activation(g, u, activation=name), _twin(name), args, (0, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_at_the_limit_has_the_gradient_that_pytorch_gives_it(dtype, device):
    """PyTorch's clamp has changed its mind about it; in bfloat16 such numbers are common."""
    act, around = ACTIVATIONS["gpt_oss"], [7.0, -7.0, 6.96875, -6.96875, 7.03125, -7.03125]
    gate, up = torch.tensor([(g, u) for g in around for u in around], dtype=dtype, device=device).T.contiguous()
    found, wanted = [], []
    for fn, grads in ((lambda *x: opake_gated_activation(*x, activation=act), found), (_twin(act), wanted)):
        leaves = [t.clone().requires_grad_() for t in (gate, up)]
        grads += torch.autograd.grad(fn(*leaves).sum(), leaves)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours == 0, theirs == 0)


def test_deepseek_clamp(device, check_op):
    act = Activation("silu", limit=2.0)
    args = _pair((4, 37), torch.float32, device, scale=3.0)
    check_op(lambda g, u: opake_gated_activation(g, u, activation=act), _twin(act), args, (0, 1))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "gpt_oss"])
@pytest.mark.parametrize("shape", [(2, 3, 8), (5, 6), (4,), (2, 2), (0, 6), (3, 0), (3, 5, 42)])
def test_combined(shape, name, interleaved, device, check_op):
    x = torch.randn(shape, device=device) * 3
    op = lambda t: opake_gated_activation(t, activation=name, interleaved=interleaved)  # noqa: E731
    check_op(op, lambda t: gated_reference(t, None, name, interleaved), [x], (0,))


def test_combined_is_read_in_place_and_has_one_gradient_buffer(device, monkeypatch):
    seen = []
    real = gated_kernels.launch
    monkeypatch.setattr(
        gated_kernels, "launch", lambda k, grid, on, *a, **m: (seen.append(a), real(k, grid, on, *a, **m))
    )
    x = torch.randn(3, 4, 16, device=device, requires_grad=True)
    (d,) = torch.autograd.grad(opake_swiglu(x).sum(), x)
    forward, backward = seen
    assert forward[0].data_ptr() == x.data_ptr()
    assert forward[1].data_ptr() == x.data_ptr() + 8 * x.element_size()
    assert backward[3].untyped_storage().data_ptr() == d.untyped_storage().data_ptr()
    assert backward[4].data_ptr() == backward[3].data_ptr() + 8 * x.element_size()


def test_strided_operands(device, check_op):
    both = torch.randn(3, 5, 12, device=device)
    layouts = [
        both.chunk(2, -1),
        (both[..., ::2], both[..., 1::2]),
        (both.transpose(0, 1), both.transpose(0, 1)),
        (both[0].expand(4, 5, 12), both[:1].expand(4, 5, 12)),
        (both[:, 1:4], both[:, 2:5]),
        (torch.randn(1, device=device).expand(7), torch.randn(7, device=device)),
    ]
    for gate, up in layouts:
        check_op(opake_swiglu, _twin("silu"), [gate, up], (0, 1))


def test_strided_gradient(device):
    gate, up = (torch.randn(3, 4, 5, device=device, requires_grad=True) for _ in range(2))
    weight = torch.randn(3, 5, 4, device=device)
    results = [
        torch.autograd.grad((op(gate, up).transpose(1, 2) * weight).sum(), (gate, up))
        for op in (opake_swiglu, _twin("silu"))
    ]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("diff", [(0,), (1,)])
def test_one_operand_needs_a_gradient(diff, device, check_op):
    check_op(opake_swiglu, _twin("silu"), _pair((3, 9), torch.float32, device), diff)


def test_frozen_operand_is_not_differentiated(device, monkeypatch):
    made = []
    real = gated.gated_backward
    monkeypatch.setattr(gated, "gated_backward", lambda *a: (made.append(a[3:5]), real(*a)))
    gate, up = _pair((3, 9), torch.float32, device)
    opake_swiglu(gate.requires_grad_(), up).sum().backward()
    assert made[0][0] is not None
    assert made[0][1] is None


def test_relu_squared(device, check_op):
    for shape in ((4, 37), (5,), ()):
        x = torch.randn(shape, device=device)
        check_op(opake_relu_squared, lambda t: torch.nn.functional.relu(t).square(), [x], (0,))


@pytest.mark.parametrize("kind", KINDS)
def test_transforms(kind, device, check_transforms):
    op, name = KINDS[kind]
    check_transforms(op, _twin(name), _pair((2, 5), torch.float32, device), (0, 1))


@pytest.mark.parametrize("interleaved", [False, True])
def test_transforms_combined(interleaved, device, check_transforms):
    op = lambda t: opake_gated_activation(t, interleaved=interleaved)  # noqa: E731
    check_transforms(op, _twin("silu", interleaved=interleaved), [torch.randn(2, 6, device=device)], (0,))


def test_pull_back_called_outside_its_transform(device):
    gate, up, ct = torch.randn(3, 2, 5, device=device)
    pulled = [torch.func.vjp(f, gate, up)[1](ct) for f in (opake_swiglu, _twin("silu"))]
    torch.testing.assert_close(*pulled)


def test_zero_examples(device):
    gate = torch.randn(0, 2, 5, device=device)
    grads = torch.func.vmap(torch.func.grad(lambda g, u: opake_swiglu(g, u).sum(), (0, 1)))(gate, gate)
    assert [tuple(g.shape) for g in grads] == [(0, 2, 5)] * 2


def test_refusals(device, check_refusals):
    check_refusals(opake_swiglu, _pair((2, 5), torch.float32, device), (0, 1))


# NumPy, under the interpreter, warns of what is asked for here
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_nan_and_infinity_pass_through(device):
    gate = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0], device=device)
    up = torch.ones_like(gate)
    for name in ("silu", "gelu_tanh", "gpt_oss", "relu2"):
        ours, torchs = (f(gate, up, activation=name) for f in (opake_gated_activation, gated_reference))
        torch.testing.assert_close(ours.isnan(), torchs.isnan())
        torch.testing.assert_close(ours.nan_to_num(), torchs.nan_to_num())


def test_autocast_promotes_like_torch(device):
    gate, up = torch.randn(3, 8, device=device), torch.randn(3, 8, device=device, dtype=torch.bfloat16)
    gate.requires_grad_(), up.requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16):
        ours, torchs = opake_swiglu(gate, up), gated_reference(gate, up)
    assert ours.dtype == torchs.dtype == torch.float32
    grads = torch.autograd.grad(ours.sum(), (gate, up))
    assert [g.dtype for g in grads] == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(2, 3), torch.ones(2, 4)), ValueError, r"up has shape \(2, 4\), expected \(2, 3\)"),
        ((torch.ones(2, 3), torch.ones(2, 3).half()), TypeError, r"torch\.float32 and torch\.float16"),
        ((torch.ones(2, 3), torch.ones(2, 3, device="meta")), ValueError, "cpu and meta"),
        ((torch.ones(2, 3).long(), torch.ones(2, 3).long()), TypeError, r"floating point, got torch\.int64"),
        (([1.0], torch.ones(1)), TypeError, "gate must be a tensor, got list"),
        ((torch.ones(2, 3),), ValueError, r"\(2, 3\), expected an even last dimension"),
    ],
)
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=message):
        opake_swiglu(*arguments)


def test_unknown_activation_names_the_known():
    with pytest.raises(ValueError, match=r"'gelu_10'; known: .*quick_gelu"):
        opake_gated_activation(torch.ones(2), torch.ones(2), activation="gelu_10")


def test_interleaved_needs_one_tensor():
    with pytest.raises(ValueError, match="one combined tensor"):
        opake_gated_activation(torch.ones(2), torch.ones(2), interleaved=True)
