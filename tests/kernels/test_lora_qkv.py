"""Three LoRA projections of one input: the same promises as for one, and what they share."""

import pytest
import torch
from torch.func import grad, vmap

from opake_kernels.lora import lora_qkv_reference, opake_lora_qkv

from .lora_cases import HIDDEN, TOKENS, adapter, loop, numbers, wide

OUTS, RANKS = (32, 16, 16), (2, 3, 5)
SCALES = [(0.7, 0.7, 0.7), (0.7, 1.3, 0.25)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _bound(op, scales=SCALES[1], keep=(True, True, True)):
    """X, W, A, B of the three, then their biases, as one flat list of tensors; adapters not kept are None."""

    def call(X, *rest):
        weights, biases = rest[:9], rest[9:] or (None,) * 3
        full = []
        for j in range(3):
            W, A, B = weights[3 * j : 3 * j + 3]
            full += [W, A, B, scales[j]] if keep[j] else [W, None, None, scales[j]]
        return op(X, *full, *biases)

    return call


def _case(lead, dtype, device, *, ranks=RANKS, param=None, bias=True):
    args = [numbers(*lead, HIDDEN, dtype=dtype, device=device)]
    for out, rank in zip(OUTS, ranks, strict=True):
        W = numbers(out, HIDDEN, dtype=dtype, device=device)
        args += [W, *adapter(HIDDEN, rank, out, dtype=param or dtype, device=device)]
    return args + ([numbers(out, dtype=dtype, device=device) for out in OUTS] if bias else [])


ADAPTERS = (2, 3, 5, 6, 8, 9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [(3, TOKENS), (7,), (0,), (3, 0), (2, 3, 4)])
def test_values_and_gradients(lead, dtype, device, check_op):
    args = _case(lead, dtype, device)
    check_op(_bound(opake_lora_qkv), _bound(lora_qkv_reference), args, (0, *ADAPTERS, 10, 11, 12), rms=True)


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("ranks", [RANKS, (4, 4, 4)])
@pytest.mark.parametrize("bias", [False, True])
def test_ranks_scalings_and_biases(scales, ranks, bias, device, check_op):
    args = _case((3, TOKENS), torch.bfloat16, device, ranks=ranks, param=torch.float32, bias=bias)
    got = check_op(_bound(opake_lora_qkv, scales), _bound(lora_qkv_reference, scales), args, (0, *ADAPTERS), rms=True)
    assert {t.dtype for t in got[:4]} == {torch.bfloat16}
    assert {t.dtype for t in got[4:]} == {torch.float32}


@pytest.mark.parametrize("keep", [(True, False, True), (False, True, False), (False, False, False)])
def test_base_only_projections(keep, device, check_op):
    diff = (0, *[i for j in range(3) if keep[j] for i in (3 * j + 2, 3 * j + 3)])
    args = _case((3, TOKENS), torch.float32, device)
    check_op(_bound(opake_lora_qkv, keep=keep), _bound(lora_qkv_reference, keep=keep), args, diff, rms=True)


@pytest.mark.parametrize("frozen", ADAPTERS)
def test_one_frozen_factor(frozen, device, check_op):
    diff = (0, *[i for i in ADAPTERS if i != frozen])
    check_op(
        _bound(opake_lora_qkv), _bound(lora_qkv_reference), _case((3, TOKENS), torch.float32, device), diff, rms=True
    )


def test_only_adapters_and_only_rows(device, check_op):
    args = _case((3, TOKENS), torch.float32, device)
    together = lambda op: lambda *a: torch.cat(_bound(op)(*a), -1)  # noqa: E731
    for diff in (ADAPTERS, (0,), (2,), (9,)):
        check_op(together(opake_lora_qkv), together(lora_qkv_reference), args, diff, rms=True)


def test_one_output_reaches_the_loss(device):
    args = _case((3, TOKENS), torch.float32, device)
    results = []
    for op in (opake_lora_qkv, lora_qkv_reference):
        leaves = [t.detach().requires_grad_() for t in args]
        leaves[1], leaves[4], leaves[7] = args[1], args[4], args[7]
        wanted = [leaves[i] for i in (0, *ADAPTERS)]
        grads = torch.autograd.grad(_bound(op)(*leaves)[1].sum(), wanted, allow_unused=True)
        results.append([torch.zeros_like(w) if g is None else g for g, w in zip(grads, wanted, strict=True)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_example_axis(dtype, device, check_op):
    args = _case((3, TOKENS), dtype, device, param=torch.float32)
    for i in ADAPTERS:
        args[i] = args[i].expand(3, *args[i].shape)
    got = check_op(_bound(opake_lora_qkv), _bound(lora_qkv_reference), args, (0, *ADAPTERS), rms=True)
    assert [g.shape[0] for g in got[4:]] == [3] * 6


def test_example_axis_and_vmap_equal_a_loop(device):
    args = [t.double() for t in _case((3, TOKENS), torch.float32, device)]
    op, twin = _bound(opake_lora_qkv), _bound(lora_qkv_reference)
    cts = [torch.randn(3, TOKENS, out, dtype=torch.float64, device=device) for out in OUTS]
    place = lambda new: [new.get(i, t) for i, t in enumerate(args)]  # noqa: E731

    def one(fn, x, *factors):
        return fn(*place({0: x, **dict(zip(ADAPTERS, factors, strict=True))}))

    factors = [args[i] for i in ADAPTERS]
    want = loop(lambda x, *f: one(twin, x, *f), args[0], factors, list(zip(*cts, strict=True)))
    leaves = [t.detach().requires_grad_() for t in (args[0], *wide(factors, 3))]
    torch.testing.assert_close(list(torch.autograd.grad(one(op, *leaves), leaves, cts)), want)

    def loss(x, *rest):
        return sum((y * ct).sum() for y, ct in zip(one(op, x, *rest[:6]), rest[6:], strict=True))

    got = vmap(grad(loss, tuple(range(7))), (0, *[None] * 6, 0, 0, 0))(args[0], *factors, *cts)
    torch.testing.assert_close(list(got), want)


def test_transforms(device, check_transforms):
    X, Wq, Aq, Bq, Wk, _, _, Wv, Av, Bv = _case((2,), torch.float32, device, bias=False)

    def close(op):
        return lambda X, Aq, Bq, Av, Bv: op(X, Wq, Aq, Bq, 0.7, Wk, None, None, 1.0, Wv, Av, Bv, 0.3)

    check_transforms(close(opake_lora_qkv), close(lora_qkv_reference), [X, Aq, Bq, Av, Bv], (0, 1, 2, 3, 4), rms=True)


def test_the_input_is_read_once_for_all_low_rank_factors(device, monkeypatch):
    args = _case((3, TOKENS), torch.float32, device, ranks=(3, 3, 3), bias=False)
    seen = []
    real = torch.Tensor.addmm_
    monkeypatch.setattr(
        torch.Tensor, "addmm_", lambda y, a, b, **k: (seen.append((a.shape[1], b.shape[1])), real(y, a, b, **k))[1]
    )
    _bound(opake_lora_qkv, SCALES[0])(*args)
    assert seen.count((HIDDEN, 9)) == 1
    assert (HIDDEN, 3) not in seen


def test_bad_input_names_the_projection(device):
    args = _case((3, TOKENS), torch.float32, device, bias=False)
    args[5] = args[5][:-1]
    with pytest.raises(ValueError, match=r"opake_lora_qkv: Ak has shape \(23, 3\), expected \(hidden, rank\)"):
        _bound(opake_lora_qkv)(*args)
