"""Every attention backend on CUDA against float64: masks, head layouts, head sizes; and what all of them keep to.

An error is judged against that of plain operations in the same dtype, as everywhere.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.func import vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from opake_kernels.attention import attention_reference, opake_attention
from opake_kernels.attention.backends import PUBLIC
from opake_kernels.attention.cuda import CUDNN, EFFICIENT, FLASH, flash_window, window_serves
from opake_kernels.attention.folded import folded_attention
from opake_kernels.attention.math import allowed
from opake_kernels.attention.route import FLASH_WINDOW, FUSED, MATH, TRITON, Asked, route
from opake_kernels.attention.tiled import tiled_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

V, T = 3, 136
WINDOW = 40
# query heads, key-value heads
LAYOUTS = [(4, 4), (4, 2), (6, 1)]
OURS = {"triton": tiled_attention}
BACKENDS = {"flash": FLASH, "efficient": EFFICIENT, "cudnn": CUDNN, "public": PUBLIC, "triton": None}


def heads(N: int, K: int, D: int, dtype: torch.dtype, tokens: int = T, rows: int = V) -> list[torch.Tensor]:
    """q, k, v and an incoming gradient, in memory by token; float64 values that the dtype holds exactly."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, 1, tokens, n, D) for n in (N, K, K, N)]
    return [torch.randn(*s, generator=generator).to("cuda", dtype).transpose(2, 3) for s in shapes]


def mask_of(kind: str) -> torch.Tensor | None:
    """(V, 1, 1, T, T) or shared (1, 1, T, T), boolean or additive."""
    causal = torch.ones(T, T, dtype=torch.bool, device="cuda").tril()
    keep = torch.ones(V, 1, 1, 1, T, dtype=torch.bool, device="cuda")
    if kind in ("none", "causal"):
        return None
    if kind == "shared":
        return (causal & ~causal.tril(-WINDOW))[None, None]
    keep[-1, ..., slice(-20, None) if kind == "right" else slice(0, 20)] = False
    mask = causal & keep
    return torch.zeros(mask.shape, device="cuda").masked_fill(~mask, float("-inf")) if kind == "additive" else mask


def run(op: Any, q: Any, k: Any, v: Any, go: Any, mask: torch.Tensor | None) -> list[torch.Tensor]:
    def one(q, k, v, go, mask):
        out, pull = vjp(lambda *t: op(*t, mask), q, k, v)
        return out, *pull(go)

    return list(vmap(one, (0, 0, 0, 0, 0 if mask is not None and mask.dim() == 5 else None))(q, k, v, go, mask))


def judge(op: Any, twin: Any, tensors: list[torch.Tensor], mask: torch.Tensor | None) -> None:
    got, same = run(op, *tensors, mask), run(twin, *tensors, mask)
    exact = run(twin, *(t.double() for t in tensors), mask)
    for name, g, s, e in zip(("out", "dq", "dk", "dv"), got, same, exact, strict=True):
        assert torch.isfinite(g).all(), name
        ours, torchs = (float((t.double() - e).norm() / e.norm()) for t in (g, s))
        assert ours <= 2 * torchs + torch.finfo(g.dtype).eps / 2, (name, ours, torchs)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", ["none", "causal", "right", "left", "additive", "shared"])
@pytest.mark.parametrize("name", BACKENDS)
def test_backends_masks_and_layouts(name: str, kind: str, layout: tuple[int, int]) -> None:
    if name == "flash" and kind not in ("none", "causal"):
        pytest.skip("the flash kernel takes no mask")
    causal, backend = kind == "causal", BACKENDS[name]

    def op(q, k, v, mask):
        if backend is None:
            return tiled_attention(q, k, v, mask=mask, causal=causal)
        return folded_attention(backend, q, k, v, mask, causal, None)

    def twin(q, k, v, mask):
        return attention_reference(q, k, v, mask=mask, causal=causal)

    judge(op, twin, heads(*layout, 64, torch.bfloat16), mask_of(kind))


OPTIONS = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": WINDOW},
    "softcap": {"causal": True, "softcap": 4.0},
    "all": {"causal": True, "softcap": 4.0, "window": WINDOW, "scale": 0.2},
}


@pytest.mark.parametrize(
    ("D", "dtype"),
    [
        (64, torch.float16),
        (64, torch.float32),
        (80, torch.bfloat16),
        (128, torch.bfloat16),
        (128, torch.float32),
        (256, torch.bfloat16),
        (256, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", OPTIONS)
def test_our_kernel_in_every_size_and_dtype(name: str, D: int, dtype: torch.dtype) -> None:
    options = OPTIONS[name]
    ops = [lambda q, k, v, m, f=f: f(q, k, v, **options) for f in (tiled_attention, attention_reference)]
    judge(*ops, heads(4, 2, D, dtype), None)


@pytest.mark.parametrize("options", [{"causal": True, "window": WINDOW}, {"mask": "left"}], ids=("window", "left"))
def test_sinks(options: dict[str, Any]) -> None:
    q, k, v, go = (t.flatten(0, 1) for t in heads(4, 2, 64, torch.bfloat16))
    if "mask" in options:
        options = {"mask": mask_of("left").flatten(0, 1)}  # type: ignore[union-attr]
    sinks = torch.randn(4, device="cuda")

    def gradients(op: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)] + [sinks.to(dtype).requires_grad_()]
        out = op(*leaves[:3], sinks=leaves[3], **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, go.to(dtype))]

    exact = gradients(attention_reference, torch.float64)
    same, got = (gradients(f, torch.bfloat16) for f in (attention_reference, tiled_attention))
    for g, s, e in zip(got, same, exact, strict=True):
        ours, torchs = (float((t.double() - e).norm() / e.norm()) for t in (g, s))
        assert ours <= 2 * torchs + 2**-9, (ours, torchs)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("window", [1, WINDOW])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_flash_with_a_window(D: int, window: int, layout: tuple[int, int]) -> None:
    tensors = heads(*layout, D, torch.bfloat16)
    q, k, v, _ = (t[:, 0] for t in tensors)
    assert window_serves(q, k, v)
    assert route(q, k, v, Asked(causal=True, window=window)) == (FLASH_WINDOW, None)
    op = lambda q, k, v, m: folded_attention(flash_window(window), q, k, v, None, True, None)  # noqa: E731
    twin = lambda q, k, v, m: attention_reference(q, k, v, causal=True, window=window)  # noqa: E731
    if window > 1:
        judge(op, twin, tensors, None)
        return
    # one key a query: its score has no gradient, in real numbers
    out, dq, dk, _ = run(op, *tensors, None)
    torch.testing.assert_close(out, tensors[2].repeat_interleave(layout[0] // layout[1], 2))
    assert max(dq.abs().max(), dk.abs().max()) < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "window"), [(1, None), (1, 4), (24, 1000), (7, 3), (65, 16)])
def test_short_rows_and_wide_windows_through_the_public_op(tokens: int, window: int | None, dtype: torch.dtype) -> None:
    q, k, v, _ = (t.flatten(0, 1) for t in heads(4, 2, 64, dtype, tokens))
    for options in ({}, {"softcap": 3.0}):
        out = opake_attention(q, k, v, causal=True, window=window, **options)
        exact = attention_reference(*(t.double() for t in (q, k, v)), causal=True, window=window, **options)
        limit = 1e-5 if dtype == torch.float32 else 1e-2
        assert float((out.double() - exact).norm() / exact.norm()) < limit


@pytest.mark.parametrize("name", ["efficient", "cudnn", "public", "triton"])
def test_rows_that_see_nothing(name: str) -> None:
    tensors, mask, backend = heads(4, 2, 64, torch.bfloat16), mask_of("left"), BACKENDS[name]
    op = {"triton": lambda q, k, v, m: tiled_attention(q, k, v, mask=m)}.get(
        name, lambda q, k, v, m: folded_attention(backend, q, k, v, m, False, None)
    )
    out, dq, dk, dv = run(op, *tensors, mask)
    assert out[-1, ..., :20, :].abs().max() == 0
    assert dq[-1, ..., :20, :].abs().max() == 0
    assert max(dk[-1, ..., :20, :].abs().max(), dv[-1, ..., :20, :].abs().max()) == 0


CALLS = {
    "flash": {"causal": True},
    "flash window": {"causal": True, "window": WINDOW},
    "masked": {"mask": "left"},
    "softcap": {"causal": True, "softcap": 4.0},
    "softcap, masked": {"softcap": 4.0, "mask": "left"},
}


@pytest.mark.parametrize("name", CALLS)
def test_a_row_has_its_own_bits(name: str) -> None:
    options = dict(CALLS[name])
    mask = mask_of(options.pop("mask")) if "mask" in options else None
    one = heads(4, 2, 64, torch.bfloat16)
    other = [torch.cat([t[:1], t[1:].flip(0) * 3]) for t in one]
    op = lambda q, k, v, m: opake_attention(q, k, v, mask=m, **options)  # noqa: E731
    torch.use_deterministic_algorithms(True)
    try:
        results = [run(op, *tensors, mask) for tensors in (one, other)]
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a[0], b[0])


@pytest.mark.parametrize("name", CALLS)
def test_operators_do_not_depend_on_contents_and_no_rule_is_missing(name: str) -> None:
    from opake.testing.trace import operator_trace

    options = dict(CALLS[name])
    mask = mask_of(options.pop("mask")) if "mask" in options else None
    op = lambda q, k, v, m: opake_attention(q, k, v, mask=m, **options)  # noqa: E731
    one = heads(4, 2, 64, torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        traces = [
            operator_trace(lambda t=t, m=m: run(op, *t, m))
            for t, m in ((one, mask), ([x * 0 for x in one], None if mask is None else torch.zeros_like(mask)))
        ]
    assert traces[0] == traces[1]
    attention = [step for step in traces[0] if "attention" in str(step)]
    assert len(attention) in (0, 2), attention


def test_which_way_calls_go() -> None:
    q, k, v, _ = (t[:, 0] for t in heads(4, 2, 64, torch.bfloat16))
    assert route(q, k, v, Asked(causal=True)) == (FUSED, None)
    assert route(q, k, v, Asked(softcap=2.0)) == (TRITON, None)
    assert route(q.float(), k.float(), v.float(), Asked(causal=True, window=9)) == (TRITON, None)
    assert route(q[:, :, :8], k, v, Asked(causal=True)) == (TRITON, None)
    odd = [t[:, :, :13] for t in (q, k, v)]
    mask = allowed(13, 13, None, True, None, q.device)
    assert route(*odd, Asked(mask=mask)) == (TRITON, None)
    with sdpa_kernel(SDPBackend.MATH):
        assert route(q, k, v, Asked(softcap=2.0))[0] == MATH
        assert route(q, k, v, Asked(causal=True, window=9)) == (FUSED, None)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert route(q, k, v, Asked(causal=True, window=9)) == (FUSED, None)
