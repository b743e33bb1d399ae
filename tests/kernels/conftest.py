"""Kernels are tested against float64: the error of a kernel is at most twice that of plain torch in the same dtype.

Without CUDA every kernel runs in Triton's interpreter on the CPU, which must be chosen before Triton is imported.
"""

import os
import warnings

import pytest
import torch
from torch.func import grad, jvp, vjp, vmap

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


def _shuffled(arg):
    if not isinstance(arg, torch.Tensor) or not arg.is_floating_point():
        return arg
    drawn = arg.flatten()[torch.randperm(arg.numel(), device=arg.device)].view(arg.shape)
    # a single number has no other place, and its error would be the same in every draw
    return drawn * (0.75 + 0.5 * torch.rand_like(drawn))


def _to(args, dtype):
    return [a.to(dtype) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]


# so many errors do not tell by their largest how large they are; in the interpreter it is more, because on some
# processors numpy's exponential is off by up to 2.4 units in the last place where torch's is off by 0.6
FEW = 256 if torch.cuda.is_available() else 512


def _largest(t):
    return t.abs().max().item()


def _rms(t):
    return t.square().mean().sqrt().item()


def _excess(i, got, same, exact, factor, size):
    """None if |got - exact| <= factor * |same - exact| + half a unit in the last place of |exact|, else what it is."""
    ours, torchs = (size(t.double() - exact) for t in (got, same))
    room = torch.finfo(got.dtype).eps / 2 * size(exact)
    return (
        None if ours <= factor * torchs + room else f"result {i}: error {ours:.3e}, torch {torchs:.3e}, room {room:.3e}"
    )


def _assert_errors(got, same, exact, factor=2.0, size=_largest, again=None):
    """The errors of `got` against those of `same`; `size` is the largest entry, or the root mean square.

    The error of one number, or of a handful, is luck on either side. Where it looks too large, `again` draws fifteen
    times more, and the root mean square over all decides.
    """
    doubtful = []
    for i, (g, s, e) in enumerate(zip(got, same, exact, strict=True)):
        assert g.shape == e.shape, f"result {i}: shape {tuple(g.shape)} against {tuple(e.shape)}"
        excess = _excess(i, g, s, e, factor, size) if e.numel() else None
        if excess and again and e.numel() < FEW:
            doubtful.append(i)
        else:
            assert excess is None, excess
    rows = [(got, same, exact), *[again() for _ in range(15)]] if doubtful else []
    for i in doubtful:
        excess = _excess(i, *[torch.stack([row[kind][i] for row in rows]) for kind in range(3)], factor, _rms)
        assert excess is None, f"over {len(rows)} draws, {excess}"


@pytest.fixture
def assert_errors():
    """assert_errors(got, same_dtype, exact_float64, factor=2): three equally long lists of tensors."""
    return _assert_errors


@pytest.fixture
def check_op():
    """check_op(op, twin, args, diff): outputs and gradients of `op` against `twin` in float64 and in the same dtype.

    `args` are tensors or plain values; `diff` the positions to differentiate. Also: inputs and cotangents unchanged,
    two backwards equal. `rms=True` judges the root mean square of the errors instead of the largest. In a further draw
    the entries of every floating tensor change places, and each is scaled by up to a quarter.
    """

    def check(op, twin, args, diff, factor=2.0, rms=False):
        before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        made = {}

        def cotangents(outs):
            if not made:
                made.update(enumerate(torch.randn_like(o, dtype=torch.float64) for o in outs))
                made.update(enumerate(made[i].to(o.dtype) for i, o in enumerate(outs)))
            return [made[i].to(o.dtype) for i, o in enumerate(outs)]

        def runs(args):
            # the first run draws the cotangents, in its own dtype
            calls = ((op, args), (twin, args), (twin, _to(args, torch.float64)))
            return [_run(fn, given, diff, cotangents) for fn, given in calls]

        got, same, exact = runs(args)
        _assert_errors(got, same, exact, factor, _rms if rms else _largest, lambda: runs([_shuffled(a) for a in args]))
        for g, s in zip(got, same, strict=True):
            assert g.dtype == s.dtype
        for old, new in zip(before, args, strict=True):
            assert not isinstance(new, torch.Tensor) or torch.equal(old, new), "an input was written"
        _check_twice(op, args, diff)
        return got

    return check


def _scalar(fn):
    """`fn` with its outputs weighted by fixed, uneven factors and summed, so that no gradient is constant."""

    def loss(*args):
        total = 0.0
        for out in _tensors(fn(*args)):
            factor = torch.cos(torch.arange(out.numel(), dtype=out.dtype, device=out.device)).reshape(out.shape)
            total = total + (out * factor).sum()
        return total

    return loss


def _batched(arg, sizes, dims):
    """`arg` with new dimensions, each slice rolled so that examples differ."""
    for size, dim in zip(sizes, dims, strict=True):
        if dim is not None:
            arg = torch.stack([torch.roll(arg, i) for i in range(size)], dim)
    return arg


def _programs(n, diff):
    """(transform of an op, sizes and in_dims of the new dimensions) for every nesting and pattern."""
    lead = (0,) * n
    patterns = [lead, (-1,) * n]
    if n > 1:
        patterns += [tuple(None if i == j else 0 for i in range(n)) for j in range(n)]
    for dims in patterns:
        yield lambda f, d=dims: vmap(grad(_scalar(f), diff), d), (3,), (dims,)
        yield lambda f, d=dims: vmap(_vjp(f, diff), d), (3,), (dims,)
        yield lambda f, d=dims: grad(_scalar(vmap(f, d)), diff), (3,), (dims,)
        yield lambda f, d=dims: vmap(vmap(grad(_scalar(f), diff), lead), d), (2, 3), (lead, dims)
        yield lambda f, d=dims: vmap(grad(_scalar(vmap(f, d)), diff), lead), (2, 3), (dims, lead)


@pytest.fixture
def check_transforms():
    """check_transforms(op, twin, args, diff): every nesting of vmap, grad and vjp, judged as in check_op.

    `args` are tensors of one example; every in_dims pattern is tried: all mapped, each one shared, last dimension.
    `rms` as in check_op.
    """

    def check(op, twin, args, diff, rms=False):
        for transform, sizes, dims in _programs(len(args), diff):
            data = [_batched(a, sizes, [d[i] for d in dims]) for i, a in enumerate(args)]

            def runs(data, transform=transform):
                calls = ((op, data), (twin, data), (twin, _to(data, torch.float64)))
                return [_tensors(transform(f)(*given)) for f, given in calls]

            again = lambda data=data, runs=runs: runs([_shuffled(a) for a in data])  # noqa: E731
            _assert_errors(*runs(data), size=_rms if rms else _largest, again=again)

    return check


def _vjp(fn, diff):
    """The gradient as opake's own vmap engine asks for it: a vjp that keeps no graph."""

    def pull(*args):
        def of(*leaves):
            full = list(args)
            for i, leaf in zip(diff, leaves, strict=True):
                full[i] = leaf
            return _scalar(fn)(*full)

        out, back = vjp(of, *[args[i] for i in diff])
        return back(torch.ones_like(out), retain_graph=False, create_graph=False)

    return pull


@pytest.fixture
def check_refusals():
    """check_refusals(op, args, diff): double backward and forward mode raise and say which op it was."""

    def check(op, args, diff):
        args = [a.detach().requires_grad_() if i in diff else a for i, a in enumerate(args)]
        leaf = args[diff[0]]
        (first,) = torch.autograd.grad(_scalar(op)(*args), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match=r"opake_.*double backward is not supported"):
            torch.autograd.grad(first.sum(), leaf)
        with pytest.raises(RuntimeError, match=r"opake_.*double backward is not supported"):
            grad(lambda x: grad(lambda x: _scalar(op)(x, *args[1:]))(x).sum())(args[0])
        primal = (args[0].detach(),)
        with warnings.catch_warnings():
            # torch's own import of its forward-mode rules
            warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
            with pytest.raises(RuntimeError, match=r"opake_.*forward-mode.*not supported"):
                jvp(lambda x: op(x, *args[1:]), primal, primal)

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
