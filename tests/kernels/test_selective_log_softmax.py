"""Selective log-softmax: values, gradients, every transform, wrong indices, refusals."""

import pytest
import torch
from torch.func import vmap

from opake_kernels.selective_log_softmax import opake_selective_log_softmax, selective_log_softmax_reference

SIZES = [((2, 3), 8, 1), ((5,), 41, 3), ((), 3, 2), ((2,), 1, 1), ((0,), 5, 2), ((3,), 5, 0), ((2,), 4100, 2)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _data(shape, V, K, device, dtype=torch.float32):
    logits = (torch.randn(*shape, V, device=device) * 3).to(dtype)
    return [logits, torch.randint(0, V, (*shape, K), device=device)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "V", "K"),
    [((2, 3), 8, 1), ((5,), 41, 3), ((), 3, 2), ((2,), 1, 1), ((0,), 5, 2), ((3,), 5, 0), ((2,), 4100, 2)],
)
def test_values_and_gradients(shape, V, K, dtype, device, check_op):
    data = _data(shape, V, K, device, dtype)
    check_op(opake_selective_log_softmax, selective_log_softmax_reference, data, (0,))


def test_twin_is_torch(device):
    logits, indices = _data((4, 3), 11, 2, device, torch.float64)
    stock = torch.log_softmax(logits, -1).gather(-1, indices)
    torch.testing.assert_close(selective_log_softmax_reference(logits, indices), stock)


def test_a_class_chosen_twice(device, check_op):
    logits, indices = _data((3,), 6, 4, device)
    check_op(opake_selective_log_softmax, selective_log_softmax_reference, [logits, indices[:, :1].expand(3, 4)], (0,))


def test_one_class_a_row(device):
    logits, indices = _data((4, 3), 11, 1, device)
    alone = opake_selective_log_softmax(logits, indices.squeeze(-1))
    assert torch.equal(alone, opake_selective_log_softmax(logits, indices).squeeze(-1))


def test_strided_logits(device, check_op):
    logits, indices = _data((3, 5), 14, 2, device)
    for view, chosen in ((logits[:, 1:], indices[:, 1:]), (logits.transpose(0, 1), indices.transpose(0, 1))):
        check_op(opake_selective_log_softmax, selective_log_softmax_reference, [view, chosen], (0,))


def test_transforms(device, check_transforms):
    data = _data((2,), 7, 2, device)
    check_transforms(opake_selective_log_softmax, selective_log_softmax_reference, data, (0,))


def test_refusals(device, check_refusals):
    check_refusals(opake_selective_log_softmax, _data((4,), 9, 1, device), (0,))


def test_autocast_gives_the_dtype_of_log_softmax(device):
    logits, indices = _data((4,), 9, 1, device, torch.bfloat16)
    with torch.autocast(device, dtype=torch.bfloat16):
        chosen = opake_selective_log_softmax(logits.requires_grad_(), indices)
        assert chosen.dtype == torch.log_softmax(logits, -1).dtype
    (d,) = torch.autograd.grad(chosen.sum(), logits)
    assert d.dtype == torch.bfloat16


def test_common_offset(device, assert_errors):
    logits, indices = torch.randn(64, 50, device=device) * 5 + 1000, torch.arange(64, device=device).view(-1, 1) % 50

    def run(op, dtype):
        z = logits.to(dtype).requires_grad_()
        chosen = op(z, indices)
        return [chosen.detach(), *torch.autograd.grad(chosen.sum(), z)]

    def stock(z, at):
        return torch.log_softmax(z, -1).gather(-1, at)

    for op in (opake_selective_log_softmax, selective_log_softmax_reference):
        assert_errors(run(op, torch.float32), run(stock, torch.float32), run(stock, torch.float64))


def test_index_out_of_range(device):
    if device == "cpu":
        with pytest.raises(ValueError, match="label 9 is out of range for a vocabulary of 9"):
            opake_selective_log_softmax(torch.randn(2, 9), torch.tensor([[0], [9]]))
    logits, indices = torch.randn(2, 9, device=device), torch.tensor([[0, 9], [1, -1]], device=device)
    for op in (opake_selective_log_softmax, selective_log_softmax_reference):
        assert vmap(op)(logits, indices).isnan().tolist() == [[False, True], [False, True]]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(2, 3), torch.zeros(3, 1, dtype=int)), ValueError, r"\(3,\), expected \(2,\)"),
        ((torch.ones(2, 3), torch.zeros(2, 1, 1, dtype=int)), ValueError, r"\(2, 1, 1\), logits \(2, 3\)"),
        ((torch.ones(2, 0), torch.zeros(2, 1, dtype=int)), ValueError, r"\(2, 0\), expected \(\.\.\., V\)"),
        ((torch.ones(2, 3), torch.zeros(2, 1)), TypeError, r"int64 or int32, got torch\.float32"),
        ((torch.ones(2, 3), torch.zeros(2, 1, dtype=int, device="meta")), ValueError, "cpu and meta"),
    ],
)
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=message):
        opake_selective_log_softmax(*arguments)
