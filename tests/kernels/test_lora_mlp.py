"""A gated MLP with LoRA: values, gradients, example axis, transforms, ranks, activations, memory, refusals."""

import pytest
import torch
from torch.func import grad, vmap

from opake_kernels import launch
from opake_kernels.activations import ACTIVATIONS
from opake_kernels.lora import gate_launch, lora_mlp, lora_mlp_reference, opake_lora_mlp

from .lora_cases import HIDDEN, INTER, TOKENS, adapter, loop, numbers, wide

RANKS, SCALES = (2, 3, 4), (0.7, 0.9, 0.5)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ADAPTERS = (2, 3, 5, 6, 8, 9)
KEEP = (True, True, True)


def _bound(op, activation="silu", scales=SCALES, keep=KEEP, **options):
    """X, then W, A, B of gate, up and down as one flat list of tensors; adapters not kept are None."""

    def call(X, *weights):
        full = []
        for j in range(3):
            W, A, B = weights[3 * j : 3 * j + 3]
            full += [W, A, B, scales[j]] if keep[j] else [W, None, None, scales[j]]
        return op(X, *full, activation, **options)

    return call


def _case(lead, dtype, device, *, ranks=RANKS, param=None, inter=INTER):
    args = [numbers(*lead, HIDDEN, dtype=dtype, device=device)]
    for rank, n_in, out in zip(ranks, (HIDDEN, HIDDEN, inter), (inter, inter, HIDDEN), strict=True):
        W = numbers(out, n_in, dtype=dtype, device=device)
        args += [W, *adapter(n_in, rank, out, dtype=param or dtype, device=device)]
    return args


def _check(check_op, args, diff=(0, *ADAPTERS), *, rematerialise=False, **options):
    op = _bound(opake_lora_mlp, rematerialise=rematerialise, **options)
    return check_op(op, _bound(lora_mlp_reference, **options), args, diff, rms=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [(3, TOKENS), (7,), (0,), (3, 0), (2, 3, 4)])
def test_values_and_gradients(lead, dtype, device, check_op):
    _check(check_op, _case(lead, dtype, device))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [(1, 16, 17), (33, 2, 5), (2, 65, 3)])
def test_ranks(ranks, dtype, device, check_op):
    got = _check(check_op, _case((2, TOKENS), dtype, device, ranks=ranks, param=torch.float32))
    assert {t.dtype for t in got[2:]} == {torch.float32}


@pytest.mark.parametrize("rank", [2, 65])
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_every_activation(name, rank, device, check_op):
    args = _case((4, TOKENS), torch.float32, device, ranks=(rank, 2, 2))
    # wide enough to reach the clamp of gpt_oss
    args[1], args[4] = args[1] * 6, args[4] * 6
    _check(check_op, args, activation=name)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_every_activation_in_plain_torch(name, device):
    args = [t.double() for t in _case((4, TOKENS), torch.float32, device)]
    args[1], args[4] = args[1] * 6, args[4] * 6
    results = []
    for op in (opake_lora_mlp, lora_mlp_reference):
        leaves = [t.detach().requires_grad_(i == 0 or i in ADAPTERS) for i, t in enumerate(args)]
        y = _bound(op, name)(*leaves)
        results.append([y.detach(), *torch.autograd.grad(y.cos().sum(), [leaves[i] for i in (0, *ADAPTERS)])])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("keep", [(True, False, True), (False, True, False), (False, False, True), (True, True, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_base_only_projections(keep, dtype, device, check_op, assert_errors):
    diff = (0, *[i for j in range(3) if keep[j] for i in (3 * j + 2, 3 * j + 3)])
    args = _case((3, TOKENS), dtype, device)
    if dtype == torch.float32:
        _check(check_op, args, diff, keep=keep)
        return
    results = []
    for op in (opake_lora_mlp, lora_mlp_reference):
        leaves = [t.detach().requires_grad_(i in diff) for i, t in enumerate(args)]
        results.append(torch.autograd.grad(_bound(op, keep=keep)(*leaves).cos().sum(), [leaves[i] for i in diff]))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("diff", [(0,), ADAPTERS, (2,), (3,), (6,), (8,), (9,), (0, 3, 6, 9), (0, 2, 5, 8)])
def test_only_what_is_asked_for(diff, device, check_op):
    _check(check_op, _case((3, TOKENS), torch.float32, device), diff)


def test_rows_are_not_kept_when_the_inner_factors_are_frozen(device):
    args = _case((3, TOKENS), torch.float32, device)
    for trained, expected in ((3, 0), (8, 0), (2, 1), (5, 1)):
        kept = []
        leaves = [t.detach().requires_grad_(i == trained) for i, t in enumerate(args)]
        with torch.autograd.graph.saved_tensors_hooks(lambda t, k=kept: (k.append(tuple(t.shape)), t)[1], lambda t: t):
            _bound(opake_lora_mlp)(*leaves)
        assert kept.count(tuple(args[0].shape)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [RANKS, (2, 65, 3)])
def test_example_axis(ranks, dtype, device, check_op):
    args = _case((3, TOKENS), dtype, device, ranks=ranks, param=torch.float32)
    for i in ADAPTERS:
        args[i] = args[i].expand(3, *args[i].shape)
    got = _check(check_op, args)
    assert [g.shape[0] for g in got[2:]] == [3] * 6


def test_example_axis_with_values_that_differ(device, check_op):
    args = _case((3, TOKENS), torch.float32, device)
    for i in ADAPTERS:
        args[i] = torch.stack([torch.roll(args[i], shift) for shift in range(3)])
    _check(check_op, args)


def test_example_axis_and_vmap_equal_a_loop(device):
    args = [t.double() for t in _case((3, TOKENS), torch.float32, device)]
    factors = [args[i] for i in ADAPTERS]
    ct = torch.randn(3, TOKENS, HIDDEN, dtype=torch.float64, device=device)

    def one(op, x, *factors):
        new = {0: x, **dict(zip(ADAPTERS, factors, strict=True))}
        return _bound(op)(*[new.get(i, t) for i, t in enumerate(args)])

    want = loop(lambda x, *f: one(lora_mlp_reference, x, *f), args[0], factors, ct)
    leaves = [t.detach().requires_grad_() for t in (args[0], *wide(factors, 3))]
    got = torch.autograd.grad(one(opake_lora_mlp, *leaves), leaves, ct)
    torch.testing.assert_close(list(got), want)
    loss = lambda x, ct, *f: (one(opake_lora_mlp, x, *f) * ct).sum()  # noqa: E731
    got = vmap(grad(loss, (0, *range(2, 8))), (0, 0, *[None] * 6))(args[0], ct, *factors)
    torch.testing.assert_close(list(got), want)


@pytest.mark.parametrize(
    ("rank", "mapped", "again"), [(65, (0, 2, 6, 8), False), (2, (0, 6), False), (2, (0, 5), True)]
)
def test_transforms(rank, mapped, again, device, check_transforms):
    args = _case((3,), torch.float32, device, ranks=(rank, 2, 2))

    def close(op, **options):
        call = _bound(op, **options)
        return lambda *new: call(*[dict(zip(mapped, new, strict=True)).get(i, t) for i, t in enumerate(args)])

    new = [args[i] for i in mapped]
    check_transforms(
        close(opake_lora_mlp, rematerialise=again), close(lora_mlp_reference), new, tuple(range(len(new))), rms=True
    )


def test_refusals(device, check_refusals):
    args = _case((2,), torch.float32, device)
    check_refusals(_bound(opake_lora_mlp), args, (0, *ADAPTERS))


def in_parts(monkeypatch, parts):
    monkeypatch.setattr(lora_mlp, "PARTS", parts)
    monkeypatch.setattr(lora_mlp, "PART", 2)


@pytest.mark.parametrize("rows", [(4, TOKENS), (1, 300), (3, TOKENS)])
@pytest.mark.parametrize("ranks", [RANKS, (2, 65, 3)])
@pytest.mark.parametrize("parts", [2, 3])
def test_backward_in_parts(parts, rows, ranks, device, check_op, monkeypatch):
    in_parts(monkeypatch, parts)
    seen, part = [], lora_mlp._part
    monkeypatch.setattr(lora_mlp, "_part", lambda *given: (seen.append(given[0][0].shape[0]), part(*given))[1])
    args = _case(rows, torch.float32, device, ranks=ranks)
    for i in ADAPTERS:
        args[i] = args[i].expand(rows[0], *args[i].shape)
    _check(check_op, args)
    assert sum(seen[:parts]) == rows[0] * rows[1]
    assert seen[:parts] == seen[-parts:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [3, 33])
def test_tiles_that_hang_over_no_edge(rank, dtype, device, check_op):
    args = _case((2, 64), dtype, device, ranks=(rank, 2, 2), param=torch.float32, inter=128)
    for i in ADAPTERS:
        args[i] = args[i].expand(2, *args[i].shape)
    _check(check_op, args)


@pytest.mark.parametrize("keep", [KEEP, (True, False, True)])
@pytest.mark.parametrize("ranks", [RANKS, (3, 3, 3)])
def test_a_group_longer_than_a_chunk(ranks, keep, device, check_op, monkeypatch):
    monkeypatch.setattr(gate_launch, "CHUNK", 64)
    diff = (0, *[i for j in range(3) if keep[j] for i in (3 * j + 2, 3 * j + 3)])
    _check(check_op, _case((2, 150), torch.float32, device, ranks=ranks), diff, keep=keep)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("own", [False, True])
def test_a_scaling_of_zero(own, dtype, device, check_op):
    args = _case((3, TOKENS), dtype, device)
    for i in ADAPTERS:
        args[i] = torch.stack([args[i] * (1 + b * own) for b in range(3)])
    _check(check_op, args, scales=(0.0, 0.9, 0.0))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("rows", [3, 15, 16, 17])
def test_an_infinite_factor_stays_where_it_is(rows, device):
    # the clamp of gpt_oss hides it; the rows that fill a tile are zeros, and zero times infinity is not
    args = _case((rows,), torch.float32, device)
    args[6][0, 1] = torch.inf
    leaves = [t.detach().requires_grad_(i in (3, 8)) for i, t in enumerate(args)]
    found = []
    for op in (opake_lora_mlp, lora_mlp_reference):
        y = _bound(op, "gpt_oss")(*leaves)
        found.append([t.isfinite() for t in (y, *torch.autograd.grad(y.sum(), (leaves[3], leaves[8])))])
    assert all(torch.equal(ours, stock) for ours, stock in zip(*found, strict=True))


def test_the_activation_is_not_kept(device):
    args = _case((3, TOKENS), torch.float32, device)
    leaves = [t.detach().requires_grad_(i == 0 or i in ADAPTERS) for i, t in enumerate(args)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        _bound(opake_lora_mlp)(*leaves)
    assert sum(tuple(t.shape) == (3, TOKENS, INTER) for t in kept) == 2
    # adapters by reference
    assert sum(any(t.data_ptr() == leaf.data_ptr() for leaf in leaves) for t in kept) == 10


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [(3, TOKENS), (7,), (0,), (2, 3, 4)])
@pytest.mark.parametrize("parts", [1, 2])
def test_rematerialised(lead, parts, dtype, device, check_op, monkeypatch):
    in_parts(monkeypatch, parts)
    _check(check_op, _case(lead, dtype, device), rematerialise=True)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("ranks", [RANKS, (2, 65, 3)])
def test_rematerialised_along_an_example_axis(ranks, own, device, check_op):
    args = _case((3, TOKENS), torch.float32, device, ranks=ranks)
    for i in ADAPTERS:
        args[i] = torch.stack([args[i] * (1 + b * own) for b in range(3)])
    _check(check_op, args, rematerialise=True)


@pytest.mark.parametrize("diff", [(0,), ADAPTERS, (2,), (3,), (6,), (8,), (9,)])
def test_rematerialised_bits_are_those_of_what_was_kept(diff, device):
    args = _case((3, TOKENS), torch.float32, device)
    results = []
    for again in (False, True):
        leaves = [t.detach().requires_grad_(i in diff) for i, t in enumerate(args)]
        y = _bound(opake_lora_mlp, rematerialise=again)(*leaves)
        results.append([y.detach(), *torch.autograd.grad(y.cos().sum(), [leaves[i] for i in diff])])
    for kept, made in zip(*results, strict=True):
        assert torch.equal(kept, made)


def test_rematerialised_keeps_nothing_as_wide_as_gate(device):
    args = _case((3, TOKENS), torch.float32, device)
    leaves = [t.detach().requires_grad_(i == 0 or i in ADAPTERS) for i, t in enumerate(args)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(tuple(t.shape)), t)[1], lambda t: t):
        _bound(opake_lora_mlp, rematerialise=True)(*leaves)
    assert kept.count((3, TOKENS, INTER)) == 0
    assert kept.count((3, TOKENS, HIDDEN)) == 1


def test_what_cannot_be_rematerialised_is_refused(device):
    args = _case((2,), torch.float32, device)
    with pytest.raises(ValueError, match="rematerialise is for frozen base weights"):
        _bound(opake_lora_mlp, rematerialise=True, lora_precision="param")(*args)
    args[7].requires_grad_()
    with pytest.raises(ValueError, match=r"requires_grad \[False, False, True\]"):
        _bound(opake_lora_mlp, rematerialise=True)(*args)


def test_param_precision_is_that_of_the_adapters(device):
    args = _case((3, TOKENS), torch.bfloat16, device, param=torch.float32)
    X, Wg, Ag, Bg, Wu, Au, Bu, Wd, Ad, Bd = args

    def peft(x, W, A, B, s):
        return (x @ W.T + ((x.float() @ A) @ B) * s).bfloat16()

    hidden = torch.nn.functional.silu(peft(X, Wg, Ag, Bg, 0.7)) * peft(X, Wu, Au, Bu, 0.9)
    got = _bound(opake_lora_mlp, lora_precision="param")(*args)
    assert torch.equal(got, peft(hidden, Wd, Ad, Bd, 0.5))


def test_trainable_base_weights_get_their_gradients(device, check_op):
    _check(check_op, _case((3, TOKENS), torch.float32, device), tuple(range(10)))


def test_autocast(device, assert_errors):
    args = _case((3, TOKENS), torch.float32, device)
    leaves = [t.detach().requires_grad_(i == 0 or i in ADAPTERS) for i, t in enumerate(args)]
    with torch.autocast(device, dtype=torch.bfloat16):
        got = _bound(opake_lora_mlp)(*leaves)
    low = [t.detach().bfloat16() for t in args]
    twin = _bound(lora_mlp_reference)
    assert got.dtype == torch.bfloat16
    assert_errors([got.detach()], [twin(*low)], [twin(*(t.double() for t in low))])
    grads = torch.autograd.grad(got.float().sum(), [leaves[i] for i in (0, *ADAPTERS)])
    assert {g.dtype for g in grads} == {torch.float32}


def test_strided_gradient(device):
    args = _case((3, TOKENS), torch.float32, device)
    results = []
    for op in (opake_lora_mlp, lora_mlp_reference):
        leaves = [t.detach().requires_grad_(i == 0 or i in ADAPTERS) for i, t in enumerate(args)]
        y = _bound(op)(*leaves)
        weight = torch.cos(torch.arange(y.numel(), device=device)).view(y.mT.shape)
        results.append(torch.autograd.grad((y.mT * weight).sum(), [leaves[i] for i in (0, *ADAPTERS)]))
    torch.testing.assert_close(*results)


def test_float64_takes_no_kernel(device, monkeypatch):
    monkeypatch.setattr(gate_launch, "launch", lambda *a, **k: pytest.fail("a kernel computes in fp32"))
    _bound(opake_lora_mlp)(*[t.double() for t in _case((3, TOKENS), torch.float32, device)])
    assert launch.HAS_TRITON


@pytest.mark.parametrize(
    ("position", "change", "message"),
    [
        (4, lambda w: w[:-1], r"Wg and Wu must have one shape, got \(40, 24\) and \(39, 24\)"),
        (7, lambda w: w[:, :-1], r"Wd has shape \(24, 39\), expected \(out, 40\)"),
        (8, lambda a: a[:-1], r"Ad has shape \(39, 4\), expected \(hidden, rank\) with hidden 40"),
        (6, lambda b: b[:, :-1], r"Bu has shape \(3, 39\), expected \(rank, out\) = \(3, 40\)"),
    ],
)
def test_bad_input(position, change, message, device):
    args = _case((3, TOKENS), torch.float32, device)
    args[position] = change(args[position])
    with pytest.raises(ValueError, match=message):
        _bound(opake_lora_mlp)(*args)


def test_zero_examples(device):
    args = _case((0, 4), torch.float32, device)
    diff = (0, *ADAPTERS)
    grads = vmap(grad(lambda *a: _bound(opake_lora_mlp)(*a).sum(), diff), (0, *[None] * 9))(*args)
    assert [tuple(g.shape) for g in grads[1:]] == [(0, *args[i].shape) for i in ADAPTERS]
