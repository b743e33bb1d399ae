"""Cross-entropy: values, gradients, every transform, labels that are ignored or wrong, layouts, refusals."""

import itertools

import pytest
import torch
from torch.func import grad, vmap
from torch.nn import functional

from opake_kernels import (
    cross_entropy,
    launch,
    opake_linear_cross_entropy_loss,
    opake_selective_log_softmax,
)
from opake_kernels import labels as labels_module
from opake_kernels.cross_entropy import CrossEntropySettings, cross_entropy_reference, opake_cross_entropy_loss

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REDUCTIONS = ["none", "sum", "mean"]
OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"logit_softcapping": 3.0},
    {"logit_scale": 0.25},
    {"ignore_index": 2, "label_smoothing": 0.2, "logit_softcapping": 5.0, "logit_scale": 2.0},
]


def _op(**options):
    return lambda logits, labels: opake_cross_entropy_loss(logits, labels, **options)


def _twin(ignore_index=-100, label_smoothing=0.0, logit_softcapping=0.0, logit_scale=1.0, reduction="mean"):
    settings = CrossEntropySettings(ignore_index, label_smoothing, logit_softcapping, logit_scale, reduction)
    return lambda logits, labels: cross_entropy_reference(logits, labels, settings)


def _data(shape, V, device, dtype=torch.float32, ignore=-100):
    logits = (torch.randn(*shape, V, device=device) * 3).to(dtype)
    labels = torch.randint(0, V, shape, device=device)
    if labels.numel() > 1:
        labels.view(-1)[1] = ignore
    return [logits, labels]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "V"), [((2, 3), 8), ((5,), 41), ((), 3), ((1, 1), 1), ((2,), 257), ((0,), 5)])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_values_and_gradients(reduction, shape, V, dtype, device, check_op):
    data = _data(shape, V, device, dtype)
    loss, _ = check_op(_op(reduction=reduction), _twin(reduction=reduction), data, (0,))
    assert loss.dtype == torch.float32
    assert loss.shape == (data[1].shape if reduction == "none" else ())


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_options(options, reduction, dtype, device, check_op):
    data = _data((3, 4), 37, device, dtype, options.get("ignore_index", -100))
    check_op(_op(reduction=reduction, **options), _twin(reduction=reduction, **options), data, (0,))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_twin_is_torch(smoothing, reduction, device):
    logits, labels = _data((4, 3), 11, device, torch.float64)
    twin = _twin(label_smoothing=smoothing, reduction=reduction)(logits, labels)
    stock = functional.cross_entropy(
        logits.view(-1, 11), labels.view(-1), label_smoothing=smoothing, reduction=reduction
    )
    torch.testing.assert_close(twin.view(-1), stock.view(-1))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_common_offset(smoothing, device, assert_errors):
    # what is added to all logits of a row changes nothing, and must cost no digits; the twin is judged as well
    logits = torch.randn(64, 50, device=device) * 5 + 1000
    labels = torch.where(torch.arange(64, device=device) % 2 == 0, logits.argmax(-1), 7)

    def run(loss, dtype):
        z = logits.to(dtype).requires_grad_()
        value = loss(z, labels)
        return [value.detach(), *torch.autograd.grad(value.sum(), z)]

    def stock(z, y):
        return functional.cross_entropy(z, y, label_smoothing=smoothing, reduction="none")

    for make in (_op, _twin):
        got = run(make(label_smoothing=smoothing, reduction="none"), torch.float32)
        assert_errors(got, run(stock, torch.float32), run(stock, torch.float64))


@pytest.mark.parametrize("V", [4093, 4096, 4100, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_tiles_and_unaligned_rows(V, dtype, device, check_op):
    # an odd vocabulary starts every row at another offset from a 16-byte boundary
    data = _data((3,), V, device, dtype)
    check_op(_op(label_smoothing=0.1), _twin(label_smoothing=0.1), data, (0,))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_transforms(reduction, device, check_transforms):
    check_transforms(_op(reduction=reduction), _twin(reduction=reduction), _data((2,), 7, device), (0,))


def test_transforms_with_options(device, check_transforms):
    options = {"label_smoothing": 0.1, "logit_softcapping": 3.0, "ignore_index": 1}
    check_transforms(_op(**options), _twin(**options), _data((2,), 7, device, ignore=1), (0,))


def test_mean_is_per_example_under_vmap(device):
    logits, labels = torch.randn(3, 4, 9, device=device), torch.randint(0, 9, (3, 4), device=device)
    labels[0, 1:], labels[2] = -100, -100
    losses = vmap(opake_cross_entropy_loss)(logits, labels)
    alone = torch.stack([opake_cross_entropy_loss(x, y) for x, y in zip(logits, labels, strict=True)])
    assert torch.equal(losses, alone)
    assert losses[2] == 0.0


def test_row_gradient_ignores_its_neighbours(device):
    logits, labels = torch.randn(3, 4, 9, device=device), torch.randint(0, 9, (3, 4), device=device)
    per_example = vmap(grad(lambda x, y: opake_cross_entropy_loss(x, y)))
    before = per_example(logits, labels)[0]
    logits[1:], labels[1:] = float("nan"), -100
    assert torch.equal(per_example(logits, labels)[0], before)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_all_ignored_is_zero(reduction, device):
    logits = torch.full((2, 3, 5), float("nan"), device=device, requires_grad=True)
    loss = opake_cross_entropy_loss(logits, torch.full((2, 3), -100, device=device), reduction=reduction)
    (d,) = torch.autograd.grad(loss.sum(), logits)
    assert not loss.any()
    assert not d.any()


def test_loss_alone(device):
    logits, labels = _data((4,), 9, device)
    with torch.no_grad():
        torch.testing.assert_close(opake_cross_entropy_loss(logits, labels), _twin()(logits, labels))


def test_minus_infinity_logits(device, check_op):
    logits, labels = _data((4,), 300, device)
    # whole 16-byte reads of nothing, and rows in which all but one class are barred
    logits[:, 16:64] = -float("inf")
    logits[2, 1:] = -float("inf")
    labels[:] = 0
    check_op(_op(), _twin(), [logits, labels], (0,))


def test_strided_logits_and_labels(device, check_op):
    logits, labels = torch.randn(3, 5, 14, device=device), torch.randint(0, 6, (3, 5), device=device)
    layouts = [
        (logits[:, :-1], labels[:, 1:]),
        (logits[..., :7], labels),
        (logits[..., ::2], labels),
        (logits.transpose(0, 1), labels.transpose(0, 1)),
        (logits[:1].expand(3, 5, 14), labels[:1].expand(3, 5)),
    ]
    for args in layouts:
        check_op(_op(), _twin(), list(args), (0,))


def test_shifted_view_is_read_in_place(device, monkeypatch):
    seen = []
    real = cross_entropy.launch
    keep = lambda k, grid, on, *a, **m: (seen.append(a[0]), real(k, grid, on, *a, **m))  # noqa: E731
    monkeypatch.setattr(cross_entropy, "launch", keep)
    logits, labels = (
        torch.randn(3, 5, 8, device=device, requires_grad=True),
        torch.zeros(3, 4, dtype=int, device=device),
    )
    opake_cross_entropy_loss(logits[:, :-1], labels, reduction="sum").backward()
    assert seen[0].data_ptr() == seen[2].data_ptr() == logits.data_ptr()


def test_int32_labels(device, check_op):
    logits, labels = _data((4,), 9, device)
    check_op(_op(), _twin(), [logits, labels.int()], (0,))


def test_float64_takes_the_twin(device):
    logits, labels = _data((4,), 9, device, torch.float64)
    loss = opake_cross_entropy_loss(logits.requires_grad_(), labels)
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, functional.cross_entropy(logits, labels))


def test_refusals(device, check_refusals):
    check_refusals(opake_cross_entropy_loss, _data((4,), 9, device), (0,))


def test_label_out_of_range_on_a_cpu_is_an_error():
    for label in (9, -1):
        with pytest.raises(ValueError, match=f"label {label} is out of range for a vocabulary of 9"):
            opake_cross_entropy_loss(torch.randn(2, 9), torch.tensor([0, label]))


@pytest.mark.parametrize("label", [9, -1, 2**31])
@pytest.mark.parametrize("fn", [opake_cross_entropy_loss, _twin()])
def test_label_out_of_range_is_nan_where_it_may_not_be_looked_at(label, fn, device):
    logits = torch.randn(2, 3, 9, device=device)
    labels = torch.tensor([[0, label, -100], [1, 2, 3]], device=device)
    grads, losses = vmap(torch.func.grad_and_value(fn))(logits, labels)
    assert losses.isnan().tolist() == [True, False]
    assert grads.isnan().any(-1).tolist() == [[False, True, False], [False] * 3]


def _linear_loss(hidden, labels):
    return opake_linear_cross_entropy_loss(hidden, torch.ones(9, 9, device=hidden.device), labels)


@pytest.mark.parametrize("fn", [opake_cross_entropy_loss, opake_selective_log_softmax, _linear_loss])
@pytest.mark.parametrize("triton", [True, False])
def test_label_out_of_range_under_debug(triton, fn, device, monkeypatch):
    monkeypatch.setattr(labels_module, "DEBUG", True)
    if not triton:
        monkeypatch.setattr(launch, "HAS_TRITON", False)
    logits, labels = torch.randn(1, 2, 9, device=device), torch.tensor([[0, 9]], device=device)
    with pytest.raises(ValueError, match="label 9 is out of range"):
        fn(logits, labels)
    with pytest.raises(ValueError, match="label 9 is out of range"):
        vmap(torch.func.grad(lambda x, y: fn(x, y).sum()))(logits, labels)
    labels[0, 1] = 8
    assert torch.isfinite(fn(logits, labels)).all()


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((torch.ones(2, 3), torch.zeros(3, dtype=int)), {}, ValueError, r"labels has shape \(3,\), expected \(2,\)"),
        ((torch.ones(2, 0), torch.zeros(2, dtype=int)), {}, ValueError, r"\(2, 0\), expected \(\.\.\., V\)"),
        ((torch.ones(()), torch.zeros((), dtype=int)), {}, ValueError, r"logits have shape \(\)"),
        ((torch.ones(2, 3), torch.zeros(2)), {}, TypeError, r"labels must be int64 or int32, got torch\.float32"),
        ((torch.ones(2, 3, dtype=int), torch.zeros(2, dtype=int)), {}, TypeError, r"floating point, got torch\.int64"),
        ((torch.ones(2, 3), torch.zeros(2, dtype=int, device="meta")), {}, ValueError, "cpu and meta"),
        (
            (torch.ones(2, 3), torch.zeros(2, dtype=int)),
            {"reduction": "avg"},
            ValueError,
            "'avg', expected one of none",
        ),
        ((torch.ones(2, 3), torch.zeros(2, dtype=int)), {"label_smoothing": 1.5}, ValueError, r"1\.5, expected"),
        ((torch.ones(2, 3), torch.zeros(2, dtype=int)), {"logit_softcapping": -1.0}, ValueError, r"-1\.0, expected"),
    ],
)
def test_bad_input(arguments, options, error, message):
    with pytest.raises(error, match=message):
        opake_cross_entropy_loss(*arguments, **options)


def test_plain_twin_serves_where_triton_cannot(device, monkeypatch):
    results = []
    for usable in (True, False):
        if not usable:
            monkeypatch.setattr(cross_entropy, "uses_triton", lambda *_: False)
        for reduction, options in itertools.product(REDUCTIONS, OPTIONS):
            torch.manual_seed(0)
            logits, labels = _data((2, 3), 9, device, ignore=options.get("ignore_index", -100))
            logits.requires_grad_()
            loss = opake_cross_entropy_loss(logits, labels, reduction=reduction, **options)
            results.append((loss.detach(), *torch.autograd.grad(loss.sum(), logits)))
    half = len(results) // 2
    torch.testing.assert_close(results[:half], results[half:])
