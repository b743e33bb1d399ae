"""Our own attention kernel, in Triton's interpreter on a CPU and compiled on a GPU, against its twin in float64.

Tiles have 16 queries and keys in the interpreter, so 34 tokens are three tiles, the last one not full.
"""

from __future__ import annotations

import functools
import math
import re

import pytest
import torch
from torch.func import vjp, vmap

from opake_kernels.attention import attention_reference, opake_attention
from opake_kernels.attention.route import FUSED, MATH, TRITON, Asked, route
from opake_kernels.attention.tiled import tiled_attention
from opake_kernels.attention.tiles import LOWEST

T = 34


def heads(B: int = 2, N: int = 2, K: int = 1, T: int = T, S: int | None = None, D: int = 16, Dv: int | None = None):
    S, Dv = S or T, Dv or D
    return [torch.randn(B, N, T, D), torch.randn(B, K, S, D), torch.randn(B, K, S, Dv)]


def padded(kind: str, B: int = 2) -> torch.Tensor:
    """(B, 1, T, T): causal, with rows that see nothing where padding is on the left."""
    mask = torch.ones(B, 1, T, T, dtype=torch.bool).tril()
    if kind == "left":
        mask[-1, :, :, :19] = False
    else:
        mask[-1, :, :, -7:] = False
    return mask


def pair(device: str, **options):
    on = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    return [functools.partial(f, **on) for f in (tiled_attention, attention_reference)]


def with_sinks(f, **options):
    return lambda q, k, v, s: f(q, k, v, sinks=s, **options)


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"causal": True, "scale": 0.3},
    "window": {"causal": True, "window": 5},
    "window over all": {"causal": True, "window": 3 * T},
    "softcap": {"softcap": 2.0},
    "softcap, window": {"causal": True, "softcap": 2.0, "window": 21},
    "right": {"mask": padded("right")},
    "left": {"mask": padded("left")},
    "left, softcap": {"mask": padded("left"), "softcap": 1.5},
    "mask, causal, window": {"mask": padded("left").tril(-1), "causal": True, "window": 9},
    "additive": {"mask": torch.randn(1, 2, T, T).masked_fill(~padded("left", 1), -math.inf)},
    "shared by rows and queries": {"mask": torch.rand(T) < 0.5},
}


@pytest.mark.parametrize("kv", [2, 1])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients(name: str, kv: int, device, check_op) -> None:
    check_op(*pair(device, **OPTIONS[name]), [t.to(device) for t in heads(K=kv)], (0, 1, 2), rms=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["causal", "softcap, window", "left"])
def test_half_dtypes(name: str, dtype: torch.dtype, device, check_op) -> None:
    check_op(*pair(device, **OPTIONS[name]), [t.to(device, dtype) for t in heads()], (0, 1, 2))


@pytest.mark.parametrize(
    "sizes",
    [
        {"D": 64},
        {"D": 24},
        {"D": 80, "K": 2},
        {"D": 16, "Dv": 40},
        {"D": 40, "Dv": 16},
        {"N": 6, "K": 2},
        {"T": 5, "S": 37},
        {"T": 37, "S": 20},
        {"T": 16},
    ],
    ids=str,
)
def test_sizes(sizes: dict, device, check_op) -> None:
    check_op(*pair(device, causal=True, window=30), [t.to(device) for t in heads(**sizes)], (0, 1, 2), rms=True)


@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"causal": True, "window": 7}, {"mask": padded("left")}],
    ids=("causal", "window", "left"),
)
def test_sinks(options: dict, device, check_op) -> None:
    on = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    ops = [with_sinks(f, **on) for f in (tiled_attention, attention_reference)]
    # in fp32 the gradients of four sinks are four roundings, of torch's and ours; test_attention.py has them
    tensors = [t.to(device, torch.bfloat16) for t in (*heads(2, 4, 2), torch.randn(4))]
    check_op(*ops, tensors, (0, 1, 2, 3), rms=True)


def test_transforms(device, check_transforms) -> None:
    def one(f):
        return lambda q, k, v, s: f(
            q[None], k[None], v[None], sinks=s, causal=True, softcap=3.0, window=5
        )[0]  # fmt: skip

    q, k, v = (t[0] for t in heads(B=1, T=9, D=8))
    args = [t.to(device, torch.bfloat16) for t in (q, k, v, torch.randn(2))]
    check_transforms(one(tiled_attention), one(attention_reference), args, (0, 1, 2, 3), rms=True)


@pytest.mark.parametrize("shared", [False, True])
def test_masks_under_vmap(shared: bool, device) -> None:
    q, k, v = (torch.randn(3, 1, n, T, 16, device=device) for n in (2, 1, 1))
    go = torch.randn(3, 1, 2, T, 16, device=device)
    mask = padded("left", 3)[:, None].to(device)
    mask, dim = (mask[0], None) if shared else (mask, 0)

    def gradients(f, *tensors):
        def one(q, k, v, go, m):
            out, pull = vjp(lambda *t: f(*t, mask=m, softcap=2.0), q, k, v)
            return out, *pull(go)

        return vmap(one, (0, 0, 0, 0, dim))(*tensors, mask)

    exact = gradients(attention_reference, *(t.double() for t in (q, k, v, go)))
    for got, want in zip(gradients(tiled_attention, q, k, v, go), exact, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("tokens", "window"), [(T, 1), (1, None)])
def test_a_query_that_sees_one_key(tokens: int, window: int | None, device) -> None:
    # its scores have no gradient, which the difference of two sums of products only nears
    q, k, v = (t.to(device).requires_grad_() for t in heads(T=tokens))
    out = tiled_attention(q, k, v, causal=True, window=window)
    torch.testing.assert_close(out, v.expand_as(out))
    go = torch.randn_like(out)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), go)
    assert max(dq.abs().max(), dk.abs().max()) < 5e-6
    torch.testing.assert_close(dv, go.sum(1, keepdim=True))


def test_a_row_of_huge_finite_scores_is_uniform_forward_and_backward(device, check_op) -> None:
    # eager attention adds finfo.min: a query that may see nothing then sees everything, equally
    mask = torch.zeros(2, 1, T, T).masked_fill(~padded("left"), torch.finfo(torch.float32).min)
    check_op(*pair(device, mask=mask), [t.to(device) for t in heads()], (0, 1, 2))
    assert float(LOWEST.value) * 1.4427 > torch.finfo(torch.float32).min
    q, k, v = (t.to(device) for t in heads())
    out = tiled_attention(q, k, v, mask=mask.to(device))
    torch.testing.assert_close(out[1, :, 0], v[1].mean(1).expand(2, -1), rtol=1e-5, atol=1e-6)


def test_rows_that_see_nothing_are_zero_and_get_nothing(device) -> None:
    q, k, v = (t.to(device).requires_grad_() for t in heads())
    out = tiled_attention(q, k, v, mask=padded("left").to(device), softcap=2.0)
    assert out[1, :, :19].abs().max() == 0
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert all(torch.isfinite(g).all() for g in grads)
    assert grads[0][1, :, :19].abs().max() == 0
    assert grads[1][1, :, :19].abs().max() == 0


def test_a_row_has_its_own_bits_whatever_travels_with_it(device) -> None:
    q, k, v = (t.to(device) for t in heads(B=4))
    sinks = torch.randn(2, device=device)

    def gradients(n: int):
        leaves = [t[:n].detach().clone().requires_grad_() for t in (q, k, v)]
        out = tiled_attention(*leaves, causal=True, softcap=2.0, sinks=sinks)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    for alone, together in zip(gradients(1), gradients(4), strict=True):
        assert torch.equal(alone[0], together[0])


def test_strides_and_frozen_inputs(device) -> None:
    q, k, v = (t.to(device) for t in heads())
    want = tiled_attention(q, k, v, causal=True)
    by_token = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert torch.equal(tiled_attention(*by_token, causal=True), want)
    assert want.transpose(1, 2).is_contiguous()
    columns = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in (q, k, v)]
    assert torch.equal(tiled_attention(*columns, causal=True), want)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    whole = torch.autograd.grad(tiled_attention(*leaves, causal=True).square().sum(), leaves)
    for i in range(3):
        some = [t if i == j else t.detach() for j, t in enumerate(leaves)]
        (one,) = torch.autograd.grad(tiled_attention(*some, causal=True).square().sum(), leaves[i])
        assert torch.equal(one, whole[i])


def test_no_rows_and_no_keys(device) -> None:
    q, k, v = (t.to(device) for t in heads())
    assert tiled_attention(q[:0], k[:0], v[:0]).shape == (0, 2, T, 16)
    assert tiled_attention(q, k[:, :, :0], v[:, :, :0]).abs().max() == 0


def test_refusals(device, check_refusals) -> None:
    check_refusals(lambda q, k, v: tiled_attention(q, k, v, causal=True), [t.to(device) for t in heads(T=5)], (0, 1, 2))
    q, k, v = (t.to(device) for t in heads())
    bias = torch.zeros(T, T, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="mask that requires a gradient"):
        tiled_attention(q, k, v, mask=bias).sum().backward()


def test_which_way_a_call_goes(device) -> None:
    q, k, v = (t.to(device) for t in heads())
    bias = torch.zeros(T, T, device=device, requires_grad=True)
    assert route(q, k, v, Asked(softcap=2.0))[0] == TRITON
    assert route(q, k, v, Asked(sinks=torch.zeros(2)))[0] == TRITON
    assert route(q, k, v[..., :8], Asked())[0] == TRITON
    assert route(q, k, v, Asked(causal=True)) == (FUSED, None)
    for tensors, asked, words in (
        ((q, k, v), Asked(dropout=0.1), "dropout"),
        ((q, k, v), Asked(mask=bias), "learned bias"),
        ((q.double(), k.double(), v.double()), Asked(softcap=2.0), "soft cap.*float64"),
        ([t.repeat(1, 1, 1, 17) for t in (q, k, v)], Asked(softcap=2.0), "272 are wider than 256"),
    ):
        taken, reason = route(*tensors, asked)
        assert taken == MATH
        assert reason is not None
        assert re.search(words, reason)


def test_the_public_op_takes_it(device, check_op) -> None:
    ops = [with_sinks(f, causal=True, window=9) for f in (opake_attention, attention_reference)]
    # in fp32 the gradients of four sinks are four roundings, of torch's and ours; test_attention.py has them
    tensors = [t.to(device, torch.bfloat16) for t in (*heads(2, 4, 2), torch.randn(4))]
    check_op(*ops, tensors, (0, 1, 2, 3), rms=True)
    leaves = [t.to(device).requires_grad_() for t in heads()]
    graph = opake_attention(*leaves, softcap=2.0).grad_fn
    assert type(graph).__name__ == "opake_attention_tritonBackward"
