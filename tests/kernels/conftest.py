"""Kernels are tested against float64: the error of a kernel is at most twice that of plain torch in the same dtype.

Without CUDA every kernel runs in Triton's interpreter on the CPU, which must be chosen before Triton is imported.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from opake_kernels import launch

# else plain twins would be compared with themselves
if not torch.cuda.is_available() and not launch.INTERPRET:
    raise RuntimeError("opake_kernels was imported before tests/kernels/conftest.py could set TRITON_INTERPRET=1")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") and not any(mark.name == "skipif" for mark in item.iter_markers()):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def _tensors(value):
    return value if isinstance(value, tuple) else (value,)


def _run(fn, args, diff, cotangents):
    """Outputs and gradients for `args[i], i in diff`, each a fresh leaf with the strides of the argument."""
    args = [a.detach().requires_grad_() if i in diff else a for i, a in enumerate(args)]
    outs = _tensors(fn(*args))
    grads = torch.autograd.grad(outs, [args[i] for i in diff], cotangents(outs)) if diff else ()
    return [t.detach() for t in (*outs, *grads)]


def _to(args, dtype):
    return [a.to(dtype) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]


def _assert_errors(got, same, exact, factor=2.0):
    """max |got - exact| <= factor * max |same - exact| + half a unit in the last place of the largest entry."""
    for i, (g, s, e) in enumerate(zip(got, same, exact, strict=True)):
        assert g.shape == e.shape, f"result {i}: shape {tuple(g.shape)} against {tuple(e.shape)}"
        if not e.numel():
            continue
        ours, torchs = ((t.double() - e).abs().max().item() for t in (g, s))
        room = torch.finfo(g.dtype).eps / 2 * e.abs().max().item()
        assert ours <= factor * torchs + room, f"result {i}: error {ours:.3e}, torch {torchs:.3e}, room {room:.3e}"


@pytest.fixture
def assert_errors():
    """assert_errors(got, same_dtype, exact_float64, factor=2): three equally long lists of tensors."""
    return _assert_errors


@pytest.fixture
def check_op():
    """check_op(op, twin, args, diff): outputs and gradients of `op` against `twin` in float64 and in the same dtype.

    `args` are tensors or plain values; `diff` the positions to differentiate. Also: inputs and cotangents unchanged,
    two backwards equal.
    """

    def check(op, twin, args, diff, factor=2.0):
        before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        made = {}

        def cotangents(outs):
            if not made:
                made.update(enumerate(torch.randn_like(o, dtype=torch.float64) for o in outs))
                made.update(enumerate(made[i].to(o.dtype) for i, o in enumerate(outs)))
            return [made[i].to(o.dtype) for i, o in enumerate(outs)]

        got = _run(op, args, diff, cotangents)
        same = _run(twin, args, diff, cotangents)
        exact = _run(twin, _to(args, torch.float64), diff, cotangents)
        _assert_errors(got, same, exact, factor)
        for g, s in zip(got, same, strict=True):
            assert g.dtype == s.dtype
        for old, new in zip(before, args, strict=True):
            assert not isinstance(new, torch.Tensor) or torch.equal(old, new), "an input was written"
        _check_twice(op, args, diff)
        return got

    return check


def _check_twice(op, args, diff):
    args = [a.detach().requires_grad_() if i in diff else a for i, a in enumerate(args)]
    outs = _tensors(op(*args))
    cts = [torch.randn_like(o) for o in outs]
    kept = [c.clone() for c in cts]
    leaves = [args[i] for i in diff]
    if not leaves:
        return
    first = [g.clone() for g in torch.autograd.grad(outs, leaves, cts, retain_graph=True)]
    second = torch.autograd.grad(outs, leaves, cts)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b), "a second backward differs: a saved tensor was written"
    for a, b in zip(kept, cts, strict=True):
        assert torch.equal(a, b), "an incoming gradient was written"
