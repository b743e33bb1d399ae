"""Attention of a microbatch in one call: every backend, mask and head layout against plain attention in float64."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from opake_kernels.attention import attention_reference, backends, opake_attention
from opake_kernels.attention.backend import Backend, schema_matches
from opake_kernels.attention.backends import CPU_FLASH, PUBLIC, choose, unknown_backends
from opake_kernels.attention.cuda import CUDNN, EFFICIENT, FLASH
from opake_kernels.attention.folded import folded_attention

V, B, N, K, T, D = 3, 2, 4, 2, 16, 16


def heads(*lead: int, dtype: torch.dtype = torch.float32, kv: int = K, device: str = "cpu") -> list[torch.Tensor]:
    """q, k, v and an incoming gradient."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(*lead, N, T, D), (*lead, kv, T, D), (*lead, kv, T, D), (*lead, N, T, D)]
    return [torch.randn(*s, generator=generator, dtype=torch.float64).to(device, dtype) for s in shapes]


def masks(*lead: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Boolean masks, broadcast over heads: causal with right or left padding (fully masked rows), a window."""
    causal = torch.ones(T, T, dtype=torch.bool, device=device).tril()
    keep = torch.ones(*lead, T, dtype=torch.bool, device=device)
    keep[-1, ..., -5:] = False
    left = torch.ones(*lead, T, dtype=torch.bool, device=device)
    left[-1, ..., :5] = False
    window = causal & ~torch.ones_like(causal).tril(-4)
    return {
        "right": causal & keep[..., None, None, :],
        "left": causal & left[..., None, None, :],
        "window": (causal & window).expand(*lead, 1, T, T),
    }


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Written apart from the library: loops over nothing, float64 in and out."""
    k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if keep is None:
        return scores.softmax(-1) @ v
    weights = (scores - scores.amax(-1, keepdim=True)).exp() * keep
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-300) @ v


def oracle(q, k, v, go, keep, scale):
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    out = plain(*leaves, keep, scale)
    return [out, *torch.autograd.grad(out, leaves, go.double())]


def worst(found, expected) -> float:
    return max(
        float((f.detach().double() - e.detach()).abs().max() / e.detach().abs().max())
        for f, e in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("kv", [4, 2, 1])
@pytest.mark.parametrize("kind", ["none", "causal", "right", "left", "window", "additive", "shared"])
@pytest.mark.parametrize("backend", [CPU_FLASH, PUBLIC], ids=lambda b: b.name)
def test_vmapped_gradients(backend: Backend, kind: str, kv: int) -> None:
    q, k, v, go = heads(V, 1, kv=kv)
    every = masks(V, 1)
    keep = {"none": None, "causal": torch.ones(T, T, dtype=torch.bool).tril(), "additive": every["left"]}.get(
        kind, every["window"][0] if kind == "shared" else every.get(kind)
    )
    mask = None if kind in ("none", "causal") else keep
    if kind == "additive":
        mask = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    dim = None if kind in ("none", "causal", "shared") else 0

    def one(q, k, v, go, mask):
        out, pull = vjp(lambda *t: folded_attention(backend, *t, mask, kind == "causal", 0.3), q, k, v)
        return out, *pull(go)

    found = vmap(one, (0, 0, 0, 0, dim))(q, k, v, go, mask)
    assert worst(found, oracle(q, k, v, go, keep, 0.3)) < 2e-6


def test_nested_transforms() -> None:
    q, k, v, go = heads(V, V, 1)
    expected = oracle(q, k, v, go, torch.ones(T, T, dtype=torch.bool).tril(), 0.25)[1:]

    def loss(q, k, v, go):
        return (folded_attention(CPU_FLASH, q, k, v, None, True, 0.25) * go).sum()

    assert worst(vmap(vmap(grad(loss, (0, 1, 2))))(q, k, v, go), expected) < 2e-6
    summed = grad(lambda *t: vmap(vmap(loss))(*t).sum(), (0, 1, 2))(q, k, v, go)
    assert worst(summed, expected) < 2e-6
    moved = vmap(vmap(grad(loss, (0, 1, 2)), (1, 0, 0, 0)), (0, 0, 0, 0))(q.transpose(1, 2), k, v, go)
    assert worst(moved, expected) < 2e-6


def test_keys_shared_by_all_examples() -> None:
    q, k, v, go = heads(V, 1)
    k, v = k[0], v[0]

    def loss(q, k, v, go):
        return (folded_attention(CPU_FLASH, q, k, v, None, False, None) * go).sum()

    _, dk, dv = vmap(grad(loss, (0, 1, 2)), (0, None, None, 0))(q, k, v, go)
    full = oracle(q, k.expand(V, *k.shape), v.expand(V, *v.shape), go, None, D**-0.5)
    assert worst((dk, dv), full[2:]) < 2e-6


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_one_call_a_microbatch() -> None:
    q, k, v, go = heads(8, 1)
    with Operators() as count:
        vmap(grad(lambda q, k, v, go: (opake_attention(q, k, v, causal=True) * go).sum(), (0, 1, 2)))(q, k, v, go)
    attention = {name: n for name, n in count.seen.items() if "attention" in name}
    assert sum(attention.values()) == 2
    assert set(attention.values()) == {1}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "window": 3},
        {"causal": True, "softcap": 2.0},
        {"causal": True, "window": 3, "softcap": 2.0},
        {"scale": 0.1},
    ],
    ids=str,
)
def test_options(options: dict) -> None:
    q, k, v, go = heads(B)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    keep = (distance >= 0) & (distance < options.get("window", T)) if options.get("causal") else None
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    kk, vv = (t.repeat_interleave(2, 1) for t in leaves[1:])
    scores = leaves[0] @ kk.transpose(-1, -2) * options.get("scale", D**-0.5)
    if "softcap" in options:
        scores = torch.tanh(scores / options["softcap"]) * options["softcap"]
    scores = scores if keep is None else scores.masked_fill(~keep, float("-inf"))
    out = scores.softmax(-1) @ vv
    expected = [out, *torch.autograd.grad(out, leaves, go.double())]
    ours = [t.clone().requires_grad_() for t in (q, k, v)]
    found = opake_attention(*ours, **options)
    assert worst([found, *torch.autograd.grad(found, ours, go)], expected) < 2e-6


def test_causal_aligns_the_last_query_with_the_last_key() -> None:
    q, k, v, _ = heads(B)
    whole = opake_attention(q, k, v, causal=True)
    torch.testing.assert_close(opake_attention(q[:, :, -3:], k, v, causal=True), whole[:, :, -3:])
    torch.testing.assert_close(attention_reference(q[:, :, -3:], k, v, causal=True), whole[:, :, -3:])


def test_sinks_take_part_and_get_gradients_per_example() -> None:
    q, k, v, go = heads(V, 1)
    sinks = torch.randn(N, generator=torch.Generator().manual_seed(1))

    def loss(sinks, q, k, v, go):
        return (opake_attention(q, k, v, causal=True, sinks=sinks) * go).sum()

    found = vmap(grad(loss), (None, 0, 0, 0, 0))(sinks, q, k, v, go)
    for i in range(V):
        leaf = sinks.double().requires_grad_()
        kk, vv = (t[i].double().repeat_interleave(2, 1) for t in (k, v))
        scores = (q[i].double() @ kk.transpose(-1, -2) * D**-0.5).masked_fill(
            ~torch.ones(T, T, dtype=torch.bool).tril(), float("-inf")
        )
        weights = torch.cat([scores, leaf.view(1, N, 1, 1).expand(1, N, T, 1)], -1).softmax(-1)[..., :-1]
        (expected,) = torch.autograd.grad(((weights @ vv) * go[i].double()).sum(), leaf)
        torch.testing.assert_close(found[i].double(), expected, rtol=1e-5, atol=1e-6)


def test_fully_masked_rows_give_zeros_and_no_nan() -> None:
    q, k, v, go = heads(B)
    keep = torch.ones(B, 1, T, T, dtype=torch.bool).tril()
    keep[0, :, :4] = False
    for mask in (keep, torch.zeros(keep.shape).masked_fill(~keep, float("-inf"))):
        for options in ({}, {"softcap": 3.0}):
            leaves = [t.clone().requires_grad_() for t in (q, k, v)]
            out = opake_attention(*leaves, mask=mask, **options)
            assert out[0, :, :4].abs().max() == 0
            grads = torch.autograd.grad(out, leaves, go)
            assert all(torch.isfinite(g).all() for g in grads)
            assert grads[0][0, :, :4].abs().max() == 0


def test_dropout_keeps_the_mean_and_differs_between_examples() -> None:
    q, k, v, _ = heads(1)
    v = torch.ones_like(v)
    dropped = vmap(lambda q: opake_attention(q, k, v, dropout=0.5), randomness="different")(q.expand(64, *q.shape))
    assert abs(float(dropped.mean()) - 1.0) < 0.05
    assert not torch.equal(dropped[0], dropped[1])


def test_a_learned_bias_gets_its_gradient() -> None:
    q, k, v, go = heads(B)
    bias = torch.randn(1, N, T, T, requires_grad=True)
    (found,) = torch.autograd.grad(opake_attention(q, k, v, mask=bias), bias, go)
    scores = q.double() @ k.repeat_interleave(2, 1).double().transpose(-1, -2) * D**-0.5 + bias.double()
    out = scores.softmax(-1) @ v.repeat_interleave(2, 1).double()
    (expected,) = torch.autograd.grad(out, bias, go.double())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="mask that requires a gradient"):
        folded_attention(PUBLIC, q, k, v, bias, False, None).sum().backward()


def test_a_learned_bias_of_each_example_gets_its_gradient() -> None:
    """Mapped by vmap and differentiated around it, where no slice says that it wants one."""
    q, k, v, _ = heads(B)
    bias = torch.randn(B, 1, N, T, T, requires_grad=True)
    of_one = lambda q, k, v, m: opake_attention(q[None], k[None], v[None], mask=m).square().sum()  # noqa: E731
    (found,) = torch.autograd.grad(vmap(of_one)(q, k, v, bias).sum(), bias)
    each = [of_one(*row) for row in zip(q, k, v, bias, strict=True)]
    (expected,) = torch.autograd.grad(sum(each), bias)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_double_backward_is_refused() -> None:
    q, k, v, _ = heads(B)
    with pytest.raises(RuntimeError, match="double backward"):
        grad(lambda q: grad(lambda q: opake_attention(q, k, v).sin().sum())(q).sum())(q)


def test_inputs_are_left_alone_and_backward_runs_twice() -> None:
    q, k, v, go = heads(B)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = opake_attention(*leaves, causal=True)
    first = torch.autograd.grad(out, leaves, go, retain_graph=True)
    second = torch.autograd.grad(out, leaves, go)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(leaves, (q, k, v), strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_as_good_as_torch(dtype: torch.dtype) -> None:
    q, k, v, go = heads(B, dtype=dtype)
    expected = oracle(q, k, v, go, torch.ones(T, T, dtype=torch.bool).tril(), D**-0.5)

    def run(fn):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = fn(*leaves)
        return [out, *torch.autograd.grad(out, leaves, go)]

    ours = worst(run(lambda q, k, v: opake_attention(q, k, v, causal=True)), expected)
    stock = worst(
        run(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)), expected
    )
    assert ours <= 2 * stock + 1e-12


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda a: {**a, "q": a["q"][0]}, ValueError, "four dimensions"),
        (lambda a: {**a, "k": a["k"][..., :8]}, ValueError, r"k has shape .*8.*expected"),
        (lambda a: {**a, "v": a["v"][:, :, :3]}, ValueError, "tokens of k"),
        (lambda a: {**a, "q": a["q"][:, :3]}, ValueError, r"query heads \(3\) must be a multiple"),
        (lambda a: {**a, "k": a["k"].double()}, TypeError, "float64"),
        (lambda a: {**a, "mask": torch.ones(3, T, dtype=torch.bool)}, ValueError, r"mask of shape \(3, 16\)"),
        (lambda a: {**a, "mask": torch.ones(T, T, dtype=torch.long)}, TypeError, "int64"),
        (lambda a: {**a, "window": 3}, ValueError, "window=3 needs causal=True"),
        (lambda a: {**a, "sinks": torch.ones(3)}, ValueError, "sinks has shape"),
    ],
)
def test_bad_input(change, error: type[Exception], text: str) -> None:
    q, k, v, _ = heads(B)
    arguments = change({"q": q, "k": k, "v": v})
    with pytest.raises(error, match=text):
        opake_attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def test_one_token_and_no_rows() -> None:
    q, k, v, _ = heads(B)
    one = opake_attention(q[:, :, :1], k[:, :, :1], v[:, :, :1], causal=True)
    torch.testing.assert_close(one, v[:, :, :1].repeat_interleave(2, 1))
    assert opake_attention(q[:0], k[:0], v[:0]).shape == (0, N, T, D)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("kv", [4, 1])
@pytest.mark.parametrize("kind", ["none", "causal", "right", "left", "window", "shared"])
@pytest.mark.parametrize("backend", [FLASH, EFFICIENT, CUDNN, PUBLIC], ids=lambda b: b.name)
def test_cuda_backends(backend: Backend, kind: str, kv: int, size: int) -> None:
    if backend is FLASH and kind not in ("none", "causal"):
        pytest.skip("the flash kernel takes no mask")
    generator = torch.Generator().manual_seed(0)
    length = 64
    shapes = [(V, 1, h, length, size) for h in (4, kv, kv, 4)]
    q, k, v, go = (torch.randn(*s, generator=generator).to("cuda", torch.bfloat16) for s in shapes)
    causal = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()
    pad = torch.ones(V, 1, length, dtype=torch.bool, device="cuda")
    pad[-1, :, -20:] = kind != "right"
    pad[-1, :, :20] = pad[-1, :, :20] & (kind != "left")
    keep = {
        "none": None,
        "causal": causal,
        "window": (causal & ~causal.tril(-8)).expand(V, 1, 1, length, length),
        "shared": (causal & ~causal.tril(-8))[None, None],
    }.get(kind, causal & pad[..., None, None, :])
    mask = None if kind in ("none", "causal") else keep
    dim = None if kind in ("none", "causal", "shared") else 0

    def one(q, k, v, go, mask, through=lambda *a: folded_attention(backend, *a)):
        out, pull = vjp(lambda *t: through(*t, mask, kind == "causal", None), q, k, v)
        return out, *pull(go)

    expected = oracle(q, k, v, go, keep, size**-0.5)
    found = vmap(one, (0, 0, 0, 0, dim))(q, k, v, go, mask)
    math = [
        attention_reference(q[i], k[i], v[i], mask=None if keep is None else keep if dim is None else keep[i])
        for i in range(V)
    ]
    assert all(torch.isfinite(t).all() for t in found)
    assert worst(found, expected) < max(2e-2, 2 * worst([torch.stack(math)], expected[:1]))


@pytest.mark.gpu
def test_cuda_choice_honours_sdpa_kernel() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (torch.randn(2, h, 64, 64, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2))
    mask = torch.ones(2, 1, 64, 64, device="cuda", dtype=torch.bool).tril()
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    assert choose(q, k, v, None, True) is (CUDNN if hopper else FLASH)
    # lengths of every size do not each get a plan of their own
    assert choose(q[:, :, :63], k[:, :, :63], v[:, :, :63], None, True) is FLASH
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert choose(q, k, v, None, True) is FLASH
    for kernel, backend in ((SDPBackend.EFFICIENT_ATTENTION, EFFICIENT), (SDPBackend.CUDNN_ATTENTION, CUDNN)):
        with sdpa_kernel(kernel):
            assert choose(q, k, v, None, True) is backend
            assert choose(q, k, v, mask, False) is backend
    with sdpa_kernel(SDPBackend.MATH):
        assert choose(q, k, v, None, True) is PUBLIC


def test_operators_in_another_form_are_not_called_and_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = heads(B)
    assert unknown_backends("cpu") == []
    monkeypatch.setattr(backends, "CPU_FLASH_SERVES", False)
    assert choose(q, k, v, None, True) is PUBLIC
    assert backends.backend_names("cpu") == ["public"]
    assert unknown_backends("cpu") == ["cpu_flash"]
    monkeypatch.setitem(backends.SERVING, FLASH, False)
    assert unknown_backends("cuda")[0] == "flash"
    assert "flash" not in backends.backend_names("cuda")


def test_schemas_are_compared_by_their_argument_names() -> None:
    name = "_scaled_dot_product_flash_attention_for_cpu"
    known = [a.name for a in getattr(torch.ops.aten, name).default._schema.arguments]
    assert schema_matches({name: known})
    assert not schema_matches({name: known[:-1]})
    # what follows has a default, so a newer torch may add it
    assert schema_matches({name: known[:-1]}, more=True)
    assert not schema_matches({name: known[:1]}, more=True)
    assert not schema_matches({name: [*known, "another"]}, more=True)
    assert not schema_matches({"_no_such_operator": []})
