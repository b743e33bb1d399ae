"""Mixture of experts: paths, routing patterns, gates, biases, example axes, transforms, adapters, refusals."""

import functools

import pytest
import torch
from torch.func import grad, vmap

from opake_kernels.activations import ACTIVATIONS, Activation
from opake_kernels.moe import Choice, choose, moe_reference, op, opake_moe

PATHS = ("dense", "grouped", "fused")
H, I = 16, 24
F32 = torch.float32
CLAMPED = Activation("silu", limit=0.7)


@pytest.fixture(autouse=True)
def _on(device):
    torch.set_default_device(device)
    yield
    torch.set_default_device(None)


@pytest.fixture(params=PATHS)
def path(request, monkeypatch, device):
    """Every call of the test takes this path, whatever it would take by itself."""
    if request.param == "grouped" and device == "cuda":
        pytest.skip("grouped_mm on CUDA is for bfloat16; see tests/gpu/test_moe.py")
    monkeypatch.setattr(op, "choose", lambda *_, **__: Choice(request.param, "asked for"))
    return request.param


def _rms(t):
    return t.square().mean().sqrt().item()


def _weights(E, *lead, dtype=torch.float32, **sizes):
    h, i = sizes.get("H", H), sizes.get("I", I)
    shapes = (E, 2 * i, h), (E, h, i)
    return [(torch.randn(*lead, *shape) * shape[-1] ** -0.5).to(dtype) for shape in shapes]


def _routing(kind, *lead, E=5, K=2):
    """(index, weights) of a routing pattern, (*lead, K)."""
    scores = torch.randn(*lead, E)
    if kind == "one takes all":
        scores[..., 3] += 100
    if kind == "some are empty":
        scores[..., ::2] -= 100
    weights, index = scores.softmax(-1).topk(K, -1)
    if kind == "twice the same":
        index[..., 1] = index[..., 0]
    return index, weights + 0.1


def _args(kind, T=7, E=5, K=2, dtype=torch.float32, **sizes):
    index, weights = _routing(kind, T, E=E, K=K)
    return [torch.randn(T, sizes.get("H", H)).to(dtype), *_weights(E, dtype=dtype, **sizes), index, weights.to(dtype)]


DIFF = (0, 1, 2, 4)
PATTERNS = ("any", "one takes all", "some are empty", "twice the same")


@pytest.mark.parametrize("kind", PATTERNS)
def test_routing_patterns(path, kind, check_op):
    check_op(opake_moe, moe_reference, _args(kind), DIFF, rms=True)


@pytest.mark.parametrize(("E", "K"), [(1, 1), (4, 1), (4, 4), (7, 3)])
def test_experts_and_choices(path, E, K, check_op):
    check_op(opake_moe, moe_reference, _args("any", E=E, K=K), DIFF, rms=True)


@pytest.mark.parametrize(("h", "i"), [(8, 4), (40, 48), (36, 20)])
def test_sizes(path, h, i, check_op):
    check_op(opake_moe, moe_reference, _args("any", T=20, H=h, I=i), DIFF, rms=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(path, dtype, check_op):
    check_op(opake_moe, moe_reference, _args("any", T=40, dtype=dtype), DIFF, rms=True)


def test_sizes_that_grouped_mm_does_not_take(check_op):
    check_op(opake_moe, moe_reference, _args("any", H=13, I=7), DIFF, rms=True)


def test_float64_is_dense(device):
    args = [a.double() if a.is_floating_point() else a for a in _args("any")]
    assert choose(torch.device(device), torch.float64, 5, 2, I, H).path == "dense"
    found = []
    for fn in (opake_moe, moe_reference):
        leaves = [args[i].clone().requires_grad_() for i in DIFF]
        out = fn(*leaves[:3], args[3], leaves[3])
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("act", [*sorted(set(ACTIVATIONS) - {"gpt_oss"}), CLAMPED])
def test_gates(act, check_op, path):
    def ours(*args):
        return opake_moe(*args, activation=act)

    def twin(*args):
        return moe_reference(*args, activation=act)

    check_op(ours, twin, _args("any"), DIFF, rms=True)


@pytest.mark.parametrize("interleaved", [False, True])
def test_biased_transposed_gate(path, interleaved, check_op):
    """The experts of gpt_oss: (E, H, 2I), halves that alternate, biases on both projections, a clamp."""
    x, gate_up, down, index, weights = _args("any")
    biases = [torch.randn(5, 2 * I) * 0.3, torch.randn(5, H) * 0.3]
    more = {"activation": "gpt_oss", "interleaved": interleaved}

    def ours(x, gate_up, down, index, weights, b, c):
        return opake_moe(x, gate_up, down, index, weights, gate_up_bias=b, down_bias=c, transposed=True, **more)

    def twin(x, gate_up, down, index, weights, b, c):
        return moe_reference(x, gate_up.mT, down.mT, index, weights, gate_up_bias=b, down_bias=c, **more)

    args = [x, gate_up.mT.contiguous() * 4, down.mT.contiguous(), index, weights, *biases]
    check_op(ours, twin, args, (0, 1, 2, 4, 5, 6), rms=True)


# an interpreted kernel takes a minute for all of them
@pytest.mark.parametrize("path", ["dense", "grouped", pytest.param("fused", marks=pytest.mark.slow)], indirect=True)
def test_transforms(path, check_transforms):
    def ours(x, gate_up, down, weights, pick):
        return opake_moe(x, gate_up, down, pick.topk(2, -1).indices, weights)

    def twin(x, gate_up, down, weights, pick):
        return moe_reference(x, gate_up, down, pick.topk(2, -1).indices, weights)

    x, gate_up, down, _, weights = _args("any", T=4, E=3, H=8, I=4)
    check_transforms(ours, twin, [x, gate_up, down, weights, torch.rand(4, 3)], (0, 1, 2, 3), rms=True)


@pytest.mark.parametrize("T", [0, 1])
def test_few_tokens(path, T):
    x, gate_up, down, index, weights = _args("any", T=T)
    leaves = [t.requires_grad_() for t in (x, gate_up, down, weights)]
    grads = torch.autograd.grad(opake_moe(x, gate_up, down, index, weights).sum(), leaves)
    assert [g.shape for g in grads] == [t.shape for t in leaves]
    assert T or not any(g.any() for g in grads)


def test_no_tokens_under_vmap(path):
    x, index, weights = torch.randn(3, 0, H), torch.zeros(3, 0, 2, dtype=torch.long), torch.randn(3, 0, 2)
    gate_up, down = _weights(5)
    found = vmap(grad(lambda g, x, i, w: opake_moe(x, g, down, i, w).sum()), (None, 0, 0, 0))(
        gate_up, x, index, weights
    )
    assert torch.equal(found, torch.zeros(3, *gate_up.shape))


def _adapters(E, rank, *lead):
    shapes = (E, H, rank), (E, rank, 2 * I), (E, I, rank), (E, rank, H)
    return [torch.randn(*lead, *shape) * 0.3 for shape in shapes]


def _with_adapters(x, gate_up, down, index, weights, A, B, Ad, Bd):
    return opake_moe(x, gate_up, down, index, weights, lora_gate_up=(A, B, 0.5), lora_down=(Ad, Bd, 2.0))


def _with_effective_weights(x, gate_up, down, index, weights, A, B, Ad, Bd):
    return moe_reference(x, gate_up + 0.5 * (A @ B).mT, down + 2.0 * (Ad @ Bd).mT, index, weights)


@pytest.mark.parametrize("rank", [1, 4, 16, 24])
def test_adapters(path, rank, check_op):
    args = [*_args("any"), *_adapters(5, rank)]
    check_op(_with_adapters, _with_effective_weights, args, (0, 1, 2, 4, 5, 6, 7, 8), rms=True)


def test_adapters_of_each_example(path, assert_errors):
    """Gradients of the adapters for each example, the stacks frozen and shared."""
    rows = [_args("any") for _ in range(3)]
    x, index, weights = (torch.stack([row[i] for row in rows]) for i in (0, 3, 4))
    gate_up, down = _weights(5)
    adapters = tuple(_adapters(5, 4))

    def run(fn, dtype):
        stacks, given = [gate_up.to(dtype), down.to(dtype)], [a.to(dtype) for a in adapters]

        def loss(given, x, index, weights):
            return fn(x, *stacks, index, weights, *given).square().sum()

        return vmap(grad(loss), (None, 0, 0, 0))(given, x.to(dtype), index, weights.to(dtype))

    results = [run(_with_adapters, torch.float32), run(_with_effective_weights, torch.float32)]
    assert_errors(*results, run(_with_effective_weights, torch.float64), size=_rms)


def test_wide_adapters_on_a_half_precision_base(path):
    x, gate_up, down, index, weights = _args("any", T=30, dtype=torch.bfloat16)
    adapters = [a.requires_grad_() for a in _adapters(5, 8)]
    exact = [a.detach().double().requires_grad_() for a in adapters]
    out = _with_adapters(x, gate_up, down, index, weights, *adapters)
    doubles = [t.double() if t.is_floating_point() else t for t in (x, gate_up, down, index, weights)]
    want = _with_effective_weights(*doubles, *exact)
    assert out.dtype == torch.bfloat16
    ct = torch.randn_like(out)
    ours = torch.autograd.grad(out, adapters, ct)
    theirs = torch.autograd.grad(want, exact, ct.double())
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - other).norm() <= 0.02 * other.norm()


@pytest.mark.parametrize("own", ["everything", "the adapters"])
def test_example_axis(path, own, assert_errors):
    """Weights with a leading example axis: one ordinary backward gives the gradients of each example."""
    B, E = 3, 5
    x, (index, weights) = torch.randn(B, 6, H), _routing("any", B, 6)
    stacks = _weights(E, B) if own == "everything" else _weights(E)
    adapters = _adapters(E, 4, B)
    leaves = [*stacks, *adapters] if own == "everything" else adapters

    def run(fn, dtype):
        args = [t.detach().to(dtype).requires_grad_() for t in leaves]
        given = args if own == "everything" else [*[s.to(dtype) for s in stacks], *args]
        out = fn(x.to(dtype), *given[:2], index, weights.to(dtype), *given[2:])
        return [out.detach(), *torch.autograd.grad(out.square().sum(), args)]

    dims = (0, *([0, 0] if own == "everything" else [None, None]), 0, 0, 0, 0, 0, 0)
    twin = vmap(_with_effective_weights, dims)
    assert_errors(*[run(fn, t) for fn, t in ((_with_adapters, F32), (twin, F32), (twin, torch.float64))], size=_rms)


def test_expanded_weights_are_one_stack(path):
    """The batched engine's parameters: an example axis of stride zero, gradients of each example."""
    x, (index, weights) = torch.randn(3, 6, H), _routing("any", 3, 6)
    stacks = [w.expand(3, *w.shape).requires_grad_() for w in _weights(5)]
    grads = torch.autograd.grad(opake_moe(x, *stacks, index, weights).square().sum(), stacks)
    for g, (a, b, i, w) in zip(zip(*grads, strict=True), zip(x, stacks[0], index, weights, strict=True), strict=True):
        leaves = [s[0].detach().requires_grad_() for s in stacks]
        want = torch.autograd.grad(opake_moe(a, *leaves, i, w).square().sum(), leaves)
        assert b.stride() == stacks[0].stride()[1:]
        for mine, other in zip(g, want, strict=True):
            torch.testing.assert_close(mine, other)


def test_only_what_is_asked_for(path, monkeypatch):
    """Frozen experts cost no weight gradient."""
    for kind in (op.Fused, op.Grouped):
        monkeypatch.setattr(kind, "segments", lambda *_, **__: pytest.fail("a weight gradient was computed"))
    x, gate_up, down, index, weights = _args("any")
    x.requires_grad_(), weights.requires_grad_()
    torch.autograd.grad(opake_moe(x, gate_up, down, index, weights).sum(), (x, weights))


def _gradients(x, index, weights, stacks):
    def loss(stacks, x, weights, index):
        return opake_moe(x, *stacks, index, weights).square().sum()

    return vmap(grad(loss, (0, 1, 2)), (None, 0, 0, 0))(stacks, x, weights, index)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_see_its_neighbours(path, dtype):
    """Bit for bit, although rows share experts: with others, with more, and again."""
    # the interpreter's products are numpy's, whose rounding depends on a row's place in a tile on some processors
    interpreted = path == "fused" and not torch.cuda.is_available()
    same = functools.partial(torch.allclose, rtol=1e-6, atol=1e-6) if interpreted else torch.equal
    T, h, i = (7, 16, 16) if interpreted else (33, 64, 48)
    stacks = _weights(5, dtype=dtype, H=h, I=i)
    x, (index, weights) = torch.randn(3, T, h).to(dtype), _routing("any", 3, T)
    want = _gradients(x, index, weights, stacks)
    again = _gradients(x, index, weights, stacks)
    for kind in ("any", "one takes all", "some are empty"):
        others, (i, w) = torch.randn(3, T, h).to(dtype), _routing(kind, 3, T)
        others[1], i[1], w[1] = x[1], index[1], weights[1]
        got = _gradients(others, i, w, stacks)
        for ours, first, second in zip(_leaves(got), _leaves(want), _leaves(again), strict=True):
            assert same(ours[1], first[1])
            assert torch.equal(first, second)


def _leaves(found):
    return [*found[0], *found[1:]]


def test_refusals_of_higher_order(path, check_refusals):
    x, gate_up, down, index, weights = _args("any")
    check_refusals(lambda x, g, d, w: opake_moe(x, g, d, index, w), [x, gate_up, down, weights], (0, 1))


def test_wrong_arguments():
    x, gate_up, down, index, weights = _args("any")
    cases = [
        ((x.long(), gate_up, down, index, weights), TypeError, "x must be floating point"),
        ((x, gate_up, down, index.float(), weights), TypeError, "top_k_index must be int64 or int32"),
        ((x, gate_up.double(), down, index, weights), TypeError, "x and gate_up must have one dtype"),
        ((x, gate_up[:, :-1], down, index, weights), ValueError, r"gate_up has shape \(5, 47, 16\), expected \(5, 48"),
        ((x[:, :-1], gate_up, down, index, weights), ValueError, r"x has shape \(15,\), expected \(16,\)"),
        ((x, gate_up, down, index[:-1], weights), ValueError, r"top_k_index has shape \(6,\), expected \(7,\)"),
        ((x, gate_up, down, index, weights[:, :1]), ValueError, r"top_k_weights has shape \(7, 1\), expected \(7, 2\)"),
        ((x, gate_up[0], down, index, weights), ValueError, "gate_up has shape .*, expected 3 dimensions, or one more"),
        ((x, gate_up.expand(3, -1, -1, -1), down, index, weights), ValueError, "first dimension is an example axis"),
    ]
    for args, error, message in cases:
        with pytest.raises(error, match=f"opake_moe: {message}|opake_moe: .*{message}"):
            opake_moe(*args)
    with pytest.raises(ValueError, match="no fused kernel for activation 'tanh'"):
        opake_moe(x, gate_up, down, index, weights, activation="tanh")


def test_choice(monkeypatch):
    from opake_kernels.moe import choice

    monkeypatch.setattr(choice, "INTERPRET", False)
    cpu, cuda, mps = (torch.device(name) for name in ("cpu", "cuda", "mps"))
    half, whole = torch.bfloat16, torch.float32
    assert choose(cpu, whole, 8, 2, I, H, grouped=False) == ("dense", "grouped=False")
    assert choose(cuda, half, 4, 4, I, H) == ("dense", "each token takes all 4 experts")
    assert choose(cpu, whole, 4, 4, I, H).path == "grouped"
    assert choose(cpu, whole, 8, 2, I, H) == ("grouped", "grouped_mm, float32 on cpu")
    assert "multiples of 4, not 16 and 21" in choose(cpu, whole, 8, 2, 21, H).why
    assert choose(mps, half, 64, 2, I, H).why == "no grouped_mm on mps"
    assert choose(cuda, whole, 64, 2, I, H).why == "no grouped_mm in float32 on cuda"
    assert choose(cuda, half, 64, 2, I, H) == ("fused", "Triton, bfloat16 on cuda")
    monkeypatch.setattr(choice, "HAS_TRITON", False)
    assert choose(cuda, half, 64, 2, I, H).path == "grouped"
    assert choose(cuda, half, 8, 2, I, H).why == "8 experts, fewer than 16"
