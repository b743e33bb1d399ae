"""Linear cross-entropy: values, gradients, every transform, both back ends, memory, labels ignored or wrong."""

import itertools

import pytest
import torch
from torch.func import grad, vjp, vmap
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opake_kernels.cross_entropy import CrossEntropySettings
from opake_kernels.linear_cross_entropy import (
    chunked,
    fused,
    linear_cross_entropy_reference,
    op,
    opake_linear_cross_entropy_loss,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REDUCTIONS = ["none", "sum", "mean"]
# the fused back end, tiles narrower than the vocabulary, one tile
CHUNKS = [None, 16, True]
OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"logit_softcapping": 3.0},
    {"logit_scale": 0.25},
    {"ignore_index": 2, "label_smoothing": 0.2, "logit_softcapping": 5.0, "logit_scale": 2.0},
]


def _op(**options):
    return lambda h, w, y, b=None: opake_linear_cross_entropy_loss(h, w, y, bias=b, **options)


def _twin(ignore_index=-100, label_smoothing=0.0, logit_softcapping=0.0, logit_scale=1.0, reduction="mean", chunk=None):
    settings = CrossEntropySettings(ignore_index, label_smoothing, logit_softcapping, logit_scale, reduction)
    return lambda h, w, y, b=None: linear_cross_entropy_reference(h, w, y, b, settings)


def _data(shape, H, V, device, dtype=torch.float32, ignore=-100, bias=True):
    hidden = torch.randn(*shape, H, device=device).to(dtype)
    weight = (torch.randn(V, H, device=device) * 2 / H**0.5).to(dtype)
    labels = torch.randint(0, V, shape, device=device)
    if labels.numel() > 1:
        labels.view(-1)[1] = ignore
    return [hidden, weight, labels, *([torch.randn(V, device=device).to(dtype)] if bias else [])]


@pytest.fixture(params=CHUNKS, ids=["fused", "tiles", "tile"])
def chunk(request):
    return request.param


@pytest.fixture
def check(check_op):
    """check(data, diff, chunk, **options): the op against its twin, fp32 by the root mean square of the errors."""

    def run(data, diff, chunk, **options):
        rms = data[0].dtype == torch.float32
        return check_op(_op(chunk=chunk, **options), _twin(**options), data, diff, rms=rms)

    return run


def _slow(chunk, device):
    # Triton's interpreter takes 10 ms a token
    return chunk is None and device == "cpu"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("diff", [(0,), (0, 1, 3)], ids=["frozen", "trainable"])
def test_values_and_gradients(diff, reduction, dtype, chunk, device, check):
    data = _data((2, 5), 16, 40, device, dtype)
    loss, *_ = check(data, diff, chunk, reduction=reduction)
    assert loss.dtype == torch.float32
    assert loss.shape == (data[2].shape if reduction == "none" else ())


@pytest.mark.parametrize(
    ("shape", "H", "V"), [((5,), 12, 33), ((), 4, 3), ((1, 1), 4, 1), ((0,), 4, 5), ((2, 0), 4, 5)]
)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("diff", [(0,), (0, 1, 3)], ids=["frozen", "trainable"])
def test_shapes(diff, reduction, shape, H, V, chunk, device, check):
    loss, *_ = check(_data(shape, H, V, device), diff, chunk, reduction=reduction)
    assert loss.shape == (shape if reduction == "none" else ())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("trainable", [False, True])
def test_common_offset(trainable, smoothing, chunk, device, assert_errors):
    def stock(h, w, labels):
        return functional.cross_entropy(h @ w.t(), labels, label_smoothing=smoothing, reduction="none")

    def run(loss, hidden, weight, labels, dtype):
        data = [hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(trainable)]
        value = loss(*data, labels)
        return [value.detach(), *torch.autograd.grad(value.sum(), data[: 1 + trainable])]

    def drawn():
        # small multiples of 1/16: the products are exact, so that only the softmax can lose digits to the offset
        hidden = torch.randint(-12, 13, (24, 9), device=device) / 4.0
        weight = torch.randint(-12, 13, (50, 9), device=device) / 4.0
        hidden[:, 0], weight[:, 0] = 1.0, 1000.0
        labels = torch.where(torch.arange(24, device=device) % 2 == 0, (hidden @ weight.t()).argmax(-1), 7)
        ours = _op(chunk=chunk, label_smoothing=smoothing, reduction="none")
        calls = ((ours, torch.float32), (stock, torch.float32), (stock, torch.float64))
        return [run(loss, hidden, weight, labels, dtype) for loss, dtype in calls]

    # on a GPU by the largest error; the interpreter takes numpy's exponential, see FEW in conftest.py
    assert_errors(*drawn(), again=drawn if device == "cpu" else None)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("diff", [(0,), (0, 1, 3)], ids=["frozen", "trainable"])
def test_options(diff, options, reduction, dtype, chunk, device, check):
    tokens = 5 if _slow(chunk, device) else 24
    data = _data((tokens,), 16, 37, device, dtype, options.get("ignore_index", -100))
    check(data, diff, chunk, reduction=reduction, **options)


@pytest.mark.parametrize("diff", [(1,), (3,), (1, 3), ()])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_any_gradient_alone(diff, reduction, chunk, device, check):
    check(_data((5,), 16, 37, device), diff, chunk, reduction=reduction, logit_softcapping=3.0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_float64_is_exact(reduction, chunk, device):
    h, w, y, b = _data((3, 4), 8, 37, device, torch.float64)
    options = {"label_smoothing": 0.1, "logit_softcapping": 3.0, "reduction": reduction}
    leaves = [t.requires_grad_() for t in (h, w, b)]
    ours, twin = (f(h, w, y, b).sum() for f in (_op(chunk=chunk, **options), _twin(**options)))
    torch.testing.assert_close(ours, twin, rtol=1e-13, atol=0)
    for a, e in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(twin, leaves), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("V", [1021, 1024, 4100, 33000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_tiles_and_odd_vocabularies(V, dtype, chunk, device, check):
    check(_data((3,), 16, V, device, dtype), (0, 1, 3), chunk, label_smoothing=0.1)


@pytest.fixture
def small_tiles(monkeypatch):
    """Eight tokens in a chunk of the fused back end, 32 in a tile of the chunked one."""
    monkeypatch.setattr(fused, "TILE_TOKENS", 8)
    monkeypatch.setattr(fused, "BUFFER_BYTES", 1)
    monkeypatch.setattr(chunked, "TILE_BYTES", 1)
    monkeypatch.setattr(chunked, "ROW_BYTES", 1)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_chunks_of_tokens(dtype, reduction, chunk, device, small_tiles, check):
    # the last chunk is shorter, and the gradient of the weight is summed over all of them
    tokens = 20 if chunk is None else 100
    check(_data((tokens,), 16, 37, device, dtype), (0, 1, 3), chunk, reduction=reduction)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [300, 1024, 2500, 40000])
def test_one_read_corrects_what_it_wrote(V, dtype, device, check):
    # logits climb by far more than e^60 allows from tile to tile, and rows differ in where
    h, w, y = _data((6,), 16, V, device, dtype, bias=False)
    climb = torch.linspace(0, 300, V, device=device)
    w[:, 0] = climb.to(dtype)
    h[:, 0] = torch.tensor([1.0, 0.3, -1.0, 0.0, 1.0, 0.05], device=device).to(dtype)
    for label in (0, V // 2, V - 1):
        check([h, w, torch.full_like(y, label)], (0,), None, reduction="none")


def test_unlikely_labels(chunk, device, assert_errors):
    # the label lies 50 below the largest logits, which are exact: a logsumexp taken from there loses digits
    hidden, weight = (torch.randint(-4, 5, (size, 9), device=device) / 4.0 for size in (16, 500))
    hidden[:, 0], weight[::7, 0], weight[3, 0] = 1.0, 50.0, 0.0
    labels = torch.full((16,), 3, device=device)

    def run(loss, dtype):
        data = [hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
        value = loss(*data, labels)
        dh, dw = torch.autograd.grad(value.sum(), data)
        # without the label's own row, the largest by far
        return [value.detach(), dh, dw[4:]]

    stock = _twin(reduction="none")
    exact, same = run(stock, torch.float64), run(stock, torch.float32)
    assert_errors(run(_op(chunk=chunk, reduction="none"), torch.float32), same, exact)


@pytest.mark.parametrize("masked", [slice(0, 16), slice(16, 32), slice(0, 36), slice(30, 40)])
@pytest.mark.parametrize("label", [38, 3])
@pytest.mark.parametrize("diff", [(0,), (0, 1, 3)], ids=["frozen", "trainable"])
def test_masked_vocabulary(diff, label, masked, chunk, device):
    # whole tiles of minus infinity, at the beginning too; where the label is masked its loss is infinite
    h, w, y, b = _data((4,), 8, 40, device)
    b[masked] = -torch.inf
    y[:2] = label
    data = [h, w, y, b]

    def run(loss):
        args = [t.detach().requires_grad_(i in diff) for i, t in enumerate(data)]
        value = loss(*args)
        return [value.detach(), *torch.autograd.grad(value.sum(), [args[i] for i in diff])]

    got, want = run(_op(chunk=chunk, reduction="none")), run(_twin(reduction="none"))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_tiles_of_a_wide_vocabulary(dtype, device):
    V, losses = 20000, []
    h, w, y, b = _data((3,), 8, V, device, dtype)
    b[:16384], y[:] = -torch.inf, torch.tensor([10, V - 1, 17000], device=device)
    for loss in (_op(reduction="none"), _twin(reduction="none")):
        x = h.detach().requires_grad_()
        value = loss(x, w, y, b)
        losses.append((value.detach(), *torch.autograd.grad(value.sum(), x)))
    assert losses[0][0][0] == torch.inf
    torch.testing.assert_close(*losses, rtol=2e-2, atol=2e-2)


def test_per_example_head_with_confident_tokens(chunk, device):
    # logits made again in a product of another size are rounded otherwise; the softmax must be of the same ones
    h, w = torch.randn(8, 2, 256, device=device), torch.randn(300, 256, device=device) * 0.05
    y = torch.randint(0, 300, (8, 2), device=device)
    h = h + w[y] / w[y].square().sum(-1, keepdim=True) * torch.rand(8, 2, 1, device=device) * 300
    exact, same, got = (
        vmap(grad(lambda w, h, y, loss=loss: loss(h, w, y)), (None, 0, 0))(w.to(dtype), h.to(dtype), y)
        for loss, dtype in (
            (_twin(reduction="sum"), torch.float64),
            (_twin(reduction="sum"), torch.float32),
            (_op(chunk=chunk, reduction="sum"), torch.float32),
        )
    )
    ours, torchs = ((d - exact).abs().max() / h.abs().max() for d in (got, same))
    assert ours <= 4 * torchs + 1e-6


def test_a_scale_of_zero(chunk, device):
    h, w, y, b = _data((5,), 8, 40, device)
    for options in ({"logit_scale": 0.0}, {"logit_scale": 0.0, "logit_softcapping": 3.0}):
        x = h.detach().requires_grad_()
        value = _op(chunk=chunk, **options)(x, w, y, b)
        torch.testing.assert_close(value, torch.full_like(value, 40.0).log())
        assert not torch.autograd.grad(value, x)[0].any()


def test_frozen_head_in_chunks_and_out_of_range(small_tiles, device, check, monkeypatch):
    h, w, y, b = _data((20,), 16, 37, device)
    check([h, w, y, b], (0,), None)
    with torch.no_grad():
        torch.testing.assert_close(_op()(h, w, y, b), _twin()(h, w, y, b))
    y[2], y[7] = 37, -100
    monkeypatch.setattr(op, "look_at_labels", lambda *_: None)
    h.requires_grad_()
    loss = _op(reduction="none")(h, w, y, b)
    (d,) = torch.autograd.grad(loss.sum(), h)
    assert torch.isnan(loss).nonzero().tolist() == [[2]]
    assert torch.isnan(d).all(1).nonzero().tolist() == [[2]]
    assert not d[7].any()


@pytest.mark.parametrize("logit", [30.0, 0.0])
@pytest.mark.parametrize("diff", [(0,), (0, 1)], ids=["frozen", "trainable"])
def test_confident_and_flat_logits(diff, logit, chunk, device, check):
    # the label wins by far: p - 1 must not be a difference of two numbers close to 1
    h, w, y = _data((6,), 8, 40, device, torch.bfloat16, bias=False)
    if logit:
        h = w[y.clamp(min=0)] * logit
    else:
        w = w * 1e-3
    check([h, w, y], diff, chunk)


# of the fused back end two, since Triton's interpreter takes 10 ms a token and this test many calls
TRANSFORMS = [(None, "none", (0,)), (None, "mean", (0, 1)), *itertools.product((16, True), REDUCTIONS, ((0,), (0, 1)))]


@pytest.mark.parametrize(("chunk", "reduction", "diff"), TRANSFORMS)
def test_transforms(diff, reduction, chunk, device, check_transforms):
    data = _data((2,) if chunk else (1,), 4, 33, device, bias=False)
    check_transforms(_op(reduction=reduction, chunk=chunk), _twin(reduction=reduction), data, diff, rms=True)


@pytest.mark.parametrize("chunk", [16, True])
def test_transforms_with_options(chunk, device, check_transforms):
    options = {"label_smoothing": 0.1, "logit_softcapping": 3.0, "ignore_index": 1}
    check_transforms(
        _op(chunk=chunk, **options), _twin(**options), _data((2,), 4, 21, device, ignore=1), (0, 1, 3), rms=True
    )


def test_weight_of_its_own_for_each_example(chunk, device):
    """The batched engine's form: the weight is expanded, and its gradient comes back per example."""
    h, w, y, b = _data((3, 4), 8, 37, device)
    for reduction in REDUCTIONS:
        loss = _op(reduction=reduction, chunk=chunk)
        want = vmap(grad(lambda w, b, h, y, f=loss: f(h, w, y, b).sum(), (0, 1)), (None, None, 0, 0))(w, b, h, y)
        wide = [t.expand(3, *t.shape).requires_grad_() for t in (w, b)]
        losses = loss(h, wide[0], y, wide[1])
        torch.testing.assert_close(losses, vmap(loss, (0, None, 0, None))(h, w, y, b))
        got = torch.autograd.grad(losses.sum(), wide)
        for a, e in zip(got, want, strict=True):
            torch.testing.assert_close(a, e)
    # and really different weights
    own = torch.stack([w, w * 2, -w])
    torch.testing.assert_close(loss(h, own, y), vmap(loss)(h, own, y))


def test_per_row_losses_in_plain_autograd(chunk, device):
    h, w, y = _data((3, 4), 8, 37, device, bias=False)
    per_row = vmap(lambda h, y: opake_linear_cross_entropy_loss(h, w, y, chunk=chunk))
    want = vmap(grad(lambda h, y: opake_linear_cross_entropy_loss(h, w, y, chunk=chunk)))(h, y)
    h.requires_grad_()
    tokens = opake_linear_cross_entropy_loss(h, w, y, reduction="none", chunk=chunk)
    losses = tokens.sum(1) / (y != -100).sum(1)
    torch.testing.assert_close(losses, per_row(h, y))
    torch.testing.assert_close(torch.autograd.grad(losses.sum(), h)[0], want)


def test_row_gradient_ignores_its_neighbours(chunk, device):
    h, w, y = _data((3, 4), 8, 37, device, bias=False)
    per_example = vmap(
        grad(lambda h, w, y: opake_linear_cross_entropy_loss(h, w, y, chunk=chunk), (0, 1)), (0, None, 0)
    )
    before = [g[0] for g in per_example(h, w, y)]
    h[1:], y[1:] = float("nan"), -100
    assert all(torch.equal(a[0], b) for a, b in zip(per_example(h, w, y), before, strict=True))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_all_ignored_is_zero(reduction, chunk, device):
    h, w, y, b = _data((2, 3), 8, 37, device)
    leaves = [t.requires_grad_() for t in (h, w, b)]
    loss = _op(reduction=reduction, chunk=chunk, label_smoothing=0.1)(h, w, torch.full_like(y, -100), b)
    grads = torch.autograd.grad(loss.sum(), leaves)
    assert not loss.any()
    assert all(not g.any() for g in grads)


def test_incoming_gradient_scales_and_is_kept(chunk, device):
    h, w, y, b = _data((2, 3), 8, 37, device)
    leaves = [t.requires_grad_() for t in (h, w, b)]
    loss = _op(chunk=chunk)(h, w, y, b)
    once = torch.autograd.grad(loss, leaves, retain_graph=True)
    twice = torch.autograd.grad(loss, leaves, torch.tensor(2.0, device=device))
    assert all(torch.equal(2 * a, b) for a, b in zip(once, twice, strict=True))


def test_refusals(chunk, device, check_refusals):
    check_refusals(_op(chunk=chunk), _data((3,), 4, 9, device, bias=False), (0,))
    check_refusals(_op(chunk=chunk, reduction="none"), _data((3,), 4, 9, device, bias=False), (0, 1))


def test_autocast(chunk, device):
    h, w, y, b = _data((2, 3), 8, 37, device)
    leaves = [t.requires_grad_() for t in (h, w, b)]
    with torch.autocast(device, torch.bfloat16):
        loss = _op(chunk=chunk)(h, w, y, b)
        stock = torch.nn.functional.cross_entropy(torch.nn.functional.linear(h, w, b).flatten(0, 1), y.flatten())
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, stock, rtol=1e-2, atol=0)
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(loss, leaves))


def test_strided_arguments(chunk, device, check_op):
    # few enough numbers that luck in the largest error is seen for what it is (conftest.py)
    h, w = torch.randn(3, 5, 8, device=device), torch.randn(8, 31, device=device)
    y = torch.randint(0, 31, (3, 5), device=device, dtype=torch.int32)
    for args in ([h[:, :-1], w.t(), y[:, 1:]], [h.transpose(0, 1), w.t(), y.t()], [h[:1].expand(3, 5, 8), w.t(), y]):
        check_op(_op(chunk=chunk), _twin(), args, (0, 1))


class _Largest(TorchDispatchMode):
    """Bytes of the largest tensor made that is no view of `given`."""

    def __init__(self, *given):
        super().__init__()
        self.bytes, self.given = 0, {t.untyped_storage().data_ptr() for t in given}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in self.given:
                self.bytes = max(self.bytes, t.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("mode", ["plain", "vmap", "none", "trainable"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "logit_softcapping": 3.0, "logit_scale": 0.5}])
def test_memory(options, mode, chunk, device, small_tiles):
    """Nothing as large as the logits of a few chunks is ever made."""
    B, T, H, V = (2, 20, 4, 500) if chunk is None else (2, 100, 4, 500)
    h, w, y = _data((B, T), H, V, device, bias=False)
    loss = _op(chunk=chunk, reduction="none" if mode == "none" else "mean", **options)
    with _Largest(h, w) as seen:
        if mode == "vmap":
            vmap(grad(loss), (0, None, 0))(h, w, y)
        else:
            h.requires_grad_()
            w.requires_grad_(mode == "trainable")
            loss(h, w, y).sum().backward()
    tokens, columns = (8, 512) if chunk is None else (32, V)
    assert 0 < seen.bytes <= 4 * tokens * columns < 4 * B * T * V / 2


def test_no_copy_of_a_frozen_weight(chunk, device):
    H, V = 64, 700
    h, w, y = _data((4,), H, V, device, bias=False)
    h.requires_grad_()
    with _Largest(h, w) as seen:
        _op(chunk=chunk, logit_scale=0.5, logit_softcapping=3.0)(h, w, y).backward()
    assert seen.bytes < 4 * V * H / 2


def test_a_frozen_head_keeps_no_hidden_states(device):
    h, w, y = _data((4,), 8, 37, device, bias=False)
    h.requires_grad_()
    doubled = h * 2
    loss = _op()(doubled, w, y)
    held = [t for t in loss.grad_fn.saved_tensors if t is not None]
    assert len(held) > 1
    assert all(t.untyped_storage().data_ptr() != doubled.untyped_storage().data_ptr() for t in held)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_labels_out_of_range(reduction, chunk, device, monkeypatch):
    h, w, y = _data((4,), 8, 37, device, bias=False)
    y[2] = 37
    if device == "cpu":
        with pytest.raises(ValueError, match="label 37 is out of range for a vocabulary of 37"):
            _op(chunk=chunk, reduction=reduction)(h, w, y)
    monkeypatch.setattr(op, "look_at_labels", lambda *_: None)
    h.requires_grad_()
    loss = _op(chunk=chunk, reduction=reduction)(h, w, y)
    (d,) = torch.autograd.grad(loss.sum(), h)
    bad = torch.isnan(d).all(1)
    assert bad[2]
    if reduction == "none":
        assert torch.isnan(loss).tolist() == [False, False, True, False]
        assert bad.tolist() == [False, False, True, False]


def test_bad_arguments(device):
    h, w, y, b = _data((2, 3), 8, 37, device)
    f = opake_linear_cross_entropy_loss
    with pytest.raises(TypeError, match=r"must have one dtype, got torch\.float32 and torch\.bfloat16"):
        f(h, w.bfloat16(), y)
    with pytest.raises(TypeError, match=r"labels must be int64 or int32, got torch\.float32"):
        f(h, w, y.float())
    with pytest.raises(ValueError, match=r"hidden has shape \(2, 3, 8\), expected \(..., H\) with H = 7"):
        f(h, w[:, :7], y)
    with pytest.raises(ValueError, match=r"labels has shape \(2, 2\), expected \(2, 3\)"):
        f(h, w, y[:, :2])
    with pytest.raises(ValueError, match=r"weight has shape \(0, 8\).*a shard that was not gathered"):
        f(h, w[:0], y)
    with pytest.raises(ValueError, match=r"bias has shape \(36,\), expected \(37,\)"):
        f(h, w, y, bias=b[1:])
    with pytest.raises(ValueError, match=r"weight has shape \(3,\), expected \(2,\)"):
        f(h, w.expand(3, 37, 8), y)
    with pytest.raises(ValueError, match="chunk is 0, expected None, True or a positive number"):
        f(h, w, y, chunk=0)
    with pytest.raises(ValueError, match="reduction is 'max', expected one of none, sum, mean"):
        f(h, w, y, reduction="max")


def test_back_ends_agree_with_each_other(device):
    h, w, y, b = _data((7,), 8, 130, device)
    results = [_op(chunk=c)(h, w, y, b) for c in (None, 1, 7, 128, 130, 10**6)]
    for one, other in itertools.pairwise(results):
        torch.testing.assert_close(one, other)


def test_vjp_without_a_graph_matches_autograd(chunk, device):
    h, w, y = _data((3, 4), 8, 37, device, bias=False)
    loss = _op(chunk=chunk)

    def one(h, y):
        value, pull = vjp(lambda h, w: loss(h, w, y), h, w)
        return pull(torch.ones_like(value), retain_graph=False, create_graph=False)

    got = vmap(one)(h, y)
    for i in range(3):
        leaves = [h[i].clone().requires_grad_(), w.clone().requires_grad_()]
        want = torch.autograd.grad(loss(leaves[0], leaves[1], y[i]), leaves)
        for a, e in zip(got, want, strict=True):
            torch.testing.assert_close(a[i], e)
