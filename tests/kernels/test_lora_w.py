"""One LoRA projection: values, gradients, example axis, transforms, precision, refusals."""

import pytest
import torch
from torch.func import grad, vmap

from opake_kernels import lora
from opake_kernels.lora import lora_w_reference, opake_lora_w

from .lora_cases import HIDDEN, TOKENS, adapter, loop, numbers, wide

OUT, RANK, SCALE = 20, 3, 0.7
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(3, TOKENS), (7,), (), (2, 3, 4), (0,), (3, 0), (0, 4)]


def _op(X, W, A, B, bias=None):
    return opake_lora_w(X, W, A, B, SCALE, bias)


def _twin(X, W, A, B, bias=None):
    return lora_w_reference(X, W, A, B, SCALE, bias)


def _case(lead, dtype, device, param=None):
    A, B = adapter(HIDDEN, RANK, OUT, dtype=param or dtype, device=device)
    make = lambda *s: numbers(*s, dtype=dtype, device=device)  # noqa: E731
    return [make(*lead, HIDDEN), make(OUT, HIDDEN), A, B, make(OUT)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", SHAPES)
def test_values_and_gradients(lead, dtype, device, check_op):
    check_op(_op, _twin, _case(lead, dtype, device), (0, 2, 3, 4), rms=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp32_adapters_keep_their_dtype(dtype, device, check_op):
    got = check_op(_op, _twin, _case((3, TOKENS), dtype, device, torch.float32), (0, 2, 3, 4), rms=True)
    assert [t.dtype for t in got] == [dtype, dtype, torch.float32, torch.float32, dtype]


def test_fp32_gradients_are_not_rounded_on_the_way(device):
    X, W, A, B, _ = _case((2, 64), torch.bfloat16, device, torch.float32)
    A, B = A.detach().requires_grad_(), B.detach().requires_grad_()
    for g in torch.autograd.grad(_op(X, W, A, B).float().sum(), (A, B)):
        assert (g != g.bfloat16().float()).any()


@pytest.mark.parametrize("rank", [1, 8, 24])
@pytest.mark.parametrize("bias", [False, True])
def test_ranks_and_bias(rank, bias, device, check_op):
    A, B = adapter(HIDDEN, rank, OUT, device=device)
    args = [numbers(3, TOKENS, HIDDEN, device=device), numbers(OUT, HIDDEN, device=device), A, B]
    args += [numbers(OUT, device=device)] if bias else []
    check_op(_op, _twin, args, (0, 2, 3), rms=True)


def test_base_projection_alone(device, check_op):
    X, W, _, _, bias = _case((3, TOKENS), torch.float32, device)
    check_op(
        lambda X, W, b: _op(X, W, None, None, b),
        lambda X, W, b: _twin(X, W, None, None, b),
        [X, W, bias],
        (0, 2),
        rms=True,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lead", [(3,), (3, TOKENS), (3, 2, 4), (1, TOKENS)])
def test_example_axis(lead, dtype, device, check_op):
    X, W, A, B, bias = _case(lead, dtype, device, torch.float32)
    got = check_op(_op, _twin, [X, W, *wide([A, B, bias], lead[0])], (0, 2, 3, 4), rms=True)
    assert [tuple(g.shape) for g in got[2:]] == [(lead[0], *t.shape) for t in (A, B, bias)]


def test_example_axis_equals_a_loop_and_vmap(device):
    X, W, A, B, bias = _case((3, TOKENS), torch.float64, device)
    ct = torch.randn(3, TOKENS, OUT, dtype=torch.float64, device=device)
    want = loop(lambda x, *p: _twin(x, W, *p), X, [A, B, bias], ct)
    leaves = [t.detach().requires_grad_() for t in (X, *wide([A, B, bias], 3))]
    X_, A_, B_, bias_ = leaves
    torch.testing.assert_close(list(torch.autograd.grad(_op(X_, W, A_, B_, bias_), leaves, ct)), want)
    loss = lambda x, a, b, c, ct: (_op(x, W, a, b, c) * ct).sum()  # noqa: E731
    got = vmap(grad(loss, (0, 1, 2, 3)), (0, None, None, None, 0))(X, A, B, bias, ct)
    torch.testing.assert_close(list(got), want)


def test_example_axis_of_one_adapter_and_values_that_differ(device, check_op):
    X, W, A, B, _ = _case((3, TOKENS), torch.float32, device)
    check_op(_op, _twin, [X, W, A.expand(3, *A.shape), B], (0, 2, 3), rms=True)
    check_op(_op, _twin, [X, W, A.expand(1, *A.shape), B.expand(3, *B.shape)], (0, 2, 3), rms=True)
    check_op(_op, _twin, [X, W, numbers(3, HIDDEN, RANK, device=device), B], (0, 2, 3), rms=True)


def test_shared_values_are_multiplied_once(device, monkeypatch):
    seen = []
    real = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *a, **k: (seen.append(tuple(a[0].shape)), real(*a, **k))[1])
    X, W, A, B, _ = _case((3, TOKENS), torch.float64, device)
    A, B = (t.detach().requires_grad_() for t in wide([A, B], 3))
    y = _op(X, W, A, B)
    assert seen == []
    torch.autograd.grad(y.sum(), (A, B))
    # the gradients alone are one product a row
    assert sorted(seen) == sorted([(3, RANK, TOKENS), (3, OUT, TOKENS)])


def test_transforms(device, check_transforms):
    X, W, A, B, bias = _case((2,), torch.float32, device)
    check_transforms(_op, _twin, [X, W, A, B, bias], (0, 2, 3, 4), rms=True)


def test_refusals(device, check_refusals):
    X, W, A, B, _ = _case((2,), torch.float32, device)
    # squared, for the op itself is linear in X: there a second derivative of zero would be right
    check_refusals(lambda X, A, B: _op(X, W, A, B).square(), [X, A, B], (0, 1, 2))


@pytest.mark.parametrize("first", ["B", "bias"])
def test_mixed_second_derivatives_raise_although_the_rows_are_not_kept(first, device):
    X, W, A, B, bias = _case((2,), torch.float32, device)
    op = {"B": lambda x, B: _op(x, W, A, B).sum(), "bias": lambda x, b: _op(x, W, A, B, b).sum()}[first]
    with pytest.raises(RuntimeError, match="opake_lora_w: double backward is not supported"):
        grad(lambda x: grad(op, 1)(x, {"B": B, "bias": bias}[first]).sum())(X)


@pytest.mark.parametrize("frozen", ["A", "B", "X"])
def test_frozen_operand_is_skipped(frozen, device, check_op):
    diff = tuple(i for i, name in ((0, "X"), (2, "A"), (3, "B")) if name != frozen)
    check_op(_op, _twin, _case((3, TOKENS), torch.float32, device)[:4], diff, rms=True)


def test_rows_are_not_kept_when_a_is_frozen(device):
    X, W, A, B, _ = _case((3, TOKENS), torch.float32, device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(tuple(t.shape)), t)[1], lambda t: t):
        _op(X, W, A, B.detach().requires_grad_())
    assert tuple(X.shape) not in kept
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(tuple(t.shape)), t)[1], lambda t: t):
        _op(X, W, A.detach().requires_grad_(), B)
    assert tuple(X.shape) in kept


def test_strided_rows_and_gradients(device):
    X, W, A, B, bias = _case((3, TOKENS), torch.float32, device)
    layouts = [X.transpose(0, 1), X[:, ::2], X[:1].expand(4, TOKENS, HIDDEN), numbers(HIDDEN, 6, device=device).mT]
    for x in layouts:
        results = []
        for op in (_op, _twin):
            leaves = [t.detach().requires_grad_() for t in (x, A, B, bias)]
            y = op(leaves[0], W, *leaves[1:])
            weight = torch.cos(torch.arange(y.numel(), device=device)).view(y.mT.shape)
            # a transposed gradient, then an expanded one
            results.append([*torch.autograd.grad((y.mT * weight).sum(), leaves, retain_graph=True), y.detach()])
            results[-1] += torch.autograd.grad(y.sum(), leaves)
        torch.testing.assert_close(*results)


def test_trainable_base_weight_gets_its_gradient(device, check_op):
    check_op(_op, _twin, _case((3, TOKENS), torch.float32, device), (0, 1, 2, 3, 4), rms=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_param_precision_is_that_of_the_adapter(dtype, device):
    X, W, A, B, bias = _case((3, TOKENS), dtype, device, torch.float32)
    got = opake_lora_w(X, W, A, B, SCALE, bias, lora_precision="param")
    base = torch.nn.functional.linear(X, W, bias)
    assert torch.equal(got, (base + (X.float() @ A) @ B * SCALE).to(dtype))


@pytest.mark.parametrize("param", [torch.float32, torch.bfloat16])
def test_autocast(param, device, assert_errors):
    X, W, A, B, bias = _case((3, TOKENS), torch.float32, device)
    leaves = [t.detach().to(dtype).requires_grad_() for t, dtype in ((X, X.dtype), (A, param), (B, param))]
    with torch.autocast(device, dtype=torch.bfloat16):
        got = opake_lora_w(leaves[0], W, leaves[1], leaves[2], SCALE, bias)
        low = [t.detach().bfloat16() for t in (X, W, A, B, bias)]
    assert got.dtype == torch.bfloat16
    assert_errors([got], [_twin(*low)], [_twin(*(t.double() for t in low))])
    grads = torch.autograd.grad(got.float().sum(), leaves)
    assert [g.dtype for g in grads] == [torch.float32, param, param]
    # nothing of the low precision stays behind
    torch.testing.assert_close(_op(X, W, A, B, bias), _twin(X, W, A, B, bias))


def test_checkpointing(device):
    X, W, A, B, _ = _case((3, TOKENS), torch.float32, device)
    leaves = [t.detach().requires_grad_() for t in (X, A, B)]
    plain = torch.autograd.grad(_op(leaves[0], W, *leaves[1:]).sum(), leaves)
    again = torch.utils.checkpoint.checkpoint(_op, leaves[0], W, *leaves[1:], use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again.sum(), leaves), plain, rtol=0, atol=0)


def test_compiles_as_its_twin(device):
    X, W, A, B, bias = _case((3, TOKENS), torch.float32, device)
    compiled = torch.compile(_op, backend="aot_eager", fullgraph=True)
    results = []
    for op in (compiled, _op):
        leaves = [t.detach().requires_grad_() for t in (X, A, B, bias)]
        y = op(leaves[0], W, *leaves[1:])
        results.append([y.detach(), *torch.autograd.grad(y.sum(), leaves)])
    torch.testing.assert_close(*results)


X, W, A, B = torch.ones(2, 5, 4), torch.ones(3, 4), torch.ones(4, 2), torch.ones(2, 3)
BAD = [
    ((torch.ones(2, 5), W, A, B, 1.0), ValueError, r"W has shape \(3, 4\), expected \(out, 5\)"),
    ((X, W, A.mT, B, 1.0), ValueError, r"A has shape \(2, 4\), expected \(hidden, rank\) with hidden 4"),
    ((X, W, A, B.mT, 1.0), ValueError, r"B has shape \(3, 2\), expected \(rank, out\) = \(2, 3\)"),
    ((X, W, A.expand(3, 4, 2), B, 1.0), ValueError, r"A has shape \(3, 4, 2\), so its first dimension is an example"),
    ((X, W, A, None, 1.0), ValueError, "A and B must be given together"),
    ((X, W, A[:, :0], B[:0], 1.0), ValueError, r"A has shape \(4, 0\), a rank of 0; give None for A and B"),
    ((X, W, A, B, 1.0, torch.ones(4)), ValueError, r"b has shape \(4,\), expected \(3,\)"),
    ((X, W, A, B, 1.0, torch.ones(5, 3)), ValueError, r"b has shape \(5, 3\), so its first dimension is an example"),
    ((X, W.half(), A, B, 1.0), TypeError, r"torch\.float32 and torch\.float16"),
    ((X.long(), W, A, B, 1.0), TypeError, r"X must be floating point, got torch\.int64"),
    ((X, W.to("meta"), A, B, 1.0), ValueError, "X is on cpu and W on meta"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD)
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=message):
        opake_lora_w(*arguments)


def test_unknown_precision():
    with pytest.raises(ValueError, match="'half', expected 'compute' or 'param'"):
        opake_lora_w(X, W, A, B, 1.0, lora_precision="half")


def test_the_package_names_its_ops():
    assert {"opake_lora_w", "opake_lora_qkv", "opake_lora_mlp"} <= set(lora.__all__)


def test_zero_examples(device):
    X, W, A, B, _ = _case((0, 4), torch.float32, device)
    grads = vmap(grad(lambda x, a, b: _op(x, W, a, b).sum(), (0, 1, 2)), (0, None, None))(X, A, B)
    assert [tuple(g.shape) for g in grads] == [(0, 4, HIDDEN), (0, HIDDEN, RANK), (0, RANK, OUT)]
    bias = torch.zeros(0, OUT, device=device, requires_grad=True)
    y = _op(X, W, A, B, bias)
    assert y.shape == (0, 4, OUT)
    assert torch.autograd.grad(y.sum(), bias)[0].shape == (0, OUT)


@pytest.mark.parametrize("op", ["w", "qkv", "mlp"])
def test_the_gradient_of_a_base_weight_of_each_example(op, device):
    """A weight that vmap maps, differentiated around it, is trainable although its slices do not say so."""
    X, _, A, B, _ = _case((3, TOKENS), torch.float64, device)
    A.requires_grad_()
    square, back = numbers(3, OUT, HIDDEN, device=device).double(), numbers(3, HIDDEN, OUT, device=device).double()
    none = (None, None, 1.0)
    ops = {
        "w": (lambda x, w, v: opake_lora_w(x, w, A, B, SCALE)),
        "qkv": (lambda x, w, v: sum(lora.opake_lora_qkv(x, w, A, B, SCALE, w, *none, w, *none))),
        "mlp": (lambda x, w, v: lora.opake_lora_mlp(x, w, A, B, SCALE, w, *none, v, *none)),
    }
    twins = {
        "w": (lambda x, w, v: lora_w_reference(x, w, A, B, SCALE)),
        "qkv": (lambda x, w, v: sum(lora.lora_qkv_reference(x, w, A, B, SCALE, w, *none, w, *none))),
        "mlp": (lambda x, w, v: lora.lora_mlp_reference(x, w, A, B, SCALE, w, *none, v, *none)),
    }

    def loss(fn, w, v):
        return vmap(lambda x, w, v: fn(x, w, v).cos().sum())(X, w, v).sum()

    for mapped in (square, square.clone().requires_grad_()):
        leaves = [mapped.detach().requires_grad_(), back.detach().requires_grad_(), A]
        used = leaves if op == "mlp" else [leaves[0], A]
        want = torch.autograd.grad(loss(twins[op], *leaves[:2]), used)
        for got, exact in zip(torch.autograd.grad(loss(ops[op], *leaves[:2]), used), want, strict=True):
            torch.testing.assert_close(got, exact)
        torch.testing.assert_close(grad(lambda w: loss(ops[op], w, back))(square), want[0])
