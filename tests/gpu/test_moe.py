"""Experts on a GPU: errors at real sizes, bits that do not depend on neighbours, memory, capture, more than 2^31."""

from __future__ import annotations

import pytest
import torch
from torch.func import vjp, vmap

from opake import hf
from opake.bench.measure import peak_gib
from opake_kernels.moe import Choice, choose, moe_reference, op, opake_moe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BF16 = torch.bfloat16


def _args(B, T, H, I, E, K, dtype=BF16, seed=0):
    g = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, device="cuda", generator=g)

    weights, index = normal(B, T, E).softmax(-1).topk(K, -1)
    stacks = [(normal(E, 2 * I, H) * H**-0.5).to(dtype), (normal(E, H, I) * I**-0.5).to(dtype)]
    return normal(B, T, H).to(dtype), *stacks, index, weights.to(dtype)


def _plain(fn, x, gate_up, down, index, weights, stacks=True):
    leaves = [t.detach().requires_grad_() for t in ((x, weights, gate_up, down) if stacks else (x, weights))]
    given = leaves[2:] if stacks else (gate_up, down)
    out = fn(leaves[0].flatten(0, 1), *given, index.flatten(0, 1), leaves[1].flatten(0, 1))
    ct = torch.cos(torch.arange(out.numel(), device="cuda")).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, leaves, ct.to(out.dtype))]


def _per_example(x, gate_up, down, index, weights):
    def one(x, weights, index):
        out, back = vjp(lambda x, w, g, d: opake_moe(x, g, d, index, w), x, weights, gate_up, down)
        return out, *back(torch.ones_like(out), retain_graph=False, create_graph=False)

    return vmap(one)(x, weights, index)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(
    "sizes",
    [
        (4, 100, 256, 128, 8, 2),
        (2, 64, 512, 384, 32, 4),
        (1, 7, 192, 96, 7, 3),
        (2, 300, 200, 136, 6, 1),
        (1, 1, 64, 32, 4, 2),
        (1, 64, 128, 64, 300, 6),
    ],
)
def test_errors(sizes, dtype):
    args = _args(*sizes, dtype=dtype)
    assert choose(args[0].device, dtype, sizes[4], sizes[5], sizes[3], sizes[2]).path == "fused"
    exact = _plain(moe_reference, *[t.double() if t.is_floating_point() else t for t in args])
    ours, theirs = _plain(opake_moe, *args), _plain(moe_reference, *args)
    for got, same, want in zip(ours, theirs, exact, strict=True):
        assert (got - want).norm() <= 2 * (same - want).norm() + 1e-3 * want.norm()


class Stock(torch.nn.Module):
    """What Transformers' functions read of a module of experts."""

    has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True
    _is_expert_parallel = has_post_expert_norm = False

    def __init__(self, gate_up, down):
        super().__init__()
        self.gate_up_proj, self.down_proj, self.num_experts = gate_up, down, len(down)

    def _apply_gate(self, both):
        gate, up = both.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


def _stock(x, gate_up, down, index, weights):
    return hf.experts_functions()["grouped_mm"](Stock(gate_up, down), x, index, weights)


ROUTINGS = ("any", "one takes all", "some are empty")


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("sizes", [(2, 512, 1024, 384, 64, 8), (2, 300, 1024, 1536, 8, 2)])
def test_errors_beside_those_of_transformers(sizes, dtype, kind):
    args = list(_args(*sizes, dtype=dtype))
    E, K = sizes[4:]
    if kind != "any":
        # the same K for every token, or a first one in the upper half and its neighbours
        first = torch.zeros_like(args[3][..., :1]) if kind == "one takes all" else args[3][..., :1] % (E // 2)
        args[3] = (E // 2 + first + torch.arange(K, device="cuda")) % E
    exact = _plain(moe_reference, *[t.double() if t.is_floating_point() else t for t in args])
    ours, theirs = _plain(opake_moe, *args), _plain(_stock, *args)
    for got, same, want in zip(ours, theirs, exact, strict=True):
        assert (got - want).norm() <= 2 * (same - want).norm()


@pytest.mark.parametrize(("path", "dtype"), [("grouped", BF16), ("dense", BF16), ("dense", torch.float32)])
def test_paths_without_triton(path, dtype, monkeypatch):
    """What serves where Triton is missing, and float32: errors, and bits that do not depend on neighbours."""
    monkeypatch.setattr(op, "choose", lambda *_, **__: Choice(path, "asked for"))
    args = _args(3, 64, 256, 128, 16, 4, dtype=dtype)
    exact = _plain(moe_reference, *[t.double() if t.is_floating_point() else t for t in args])
    ours, theirs = _plain(opake_moe, *args), _plain(_stock, *args)
    for got, same, want in zip(ours, theirs, exact, strict=True):
        assert (got - want).norm() <= 2 * (same - want).norm()
    want, again = _per_example(*args), _per_example(*args)
    for first, second in zip(want, again, strict=True):
        assert torch.equal(first, second)
    for row in range(3):
        alone = _plain(opake_moe, *[t[row : row + 1] if i in (0, 3, 4) else t for i, t in enumerate(args)])
        assert (want[0][row] - alone[0]).norm() <= 1e-2 * alone[0].norm()


@pytest.mark.parametrize("path", ["dense", "grouped", "fused"])
def test_gradients_of_stacks_are_made_in_place(path, monkeypatch):
    """Those of each example, and beside them no more than activations."""
    monkeypatch.setattr(op, "choose", lambda *_, **__: Choice(path, "asked for"))
    B = 8
    x, gate_up, down, index, weights = _args(B, 64, 512, 512, 16, 2)
    stacks = [w.expand(B, *w.shape).requires_grad_() for w in (gate_up, down)]
    y = opake_moe(x, *stacks, index, weights)
    peak = peak_gib(lambda: torch.autograd.grad(y.sum(), stacks, retain_graph=True)) * 2**30
    size = sum(w.numel() * w.element_size() for w in stacks)
    assert size <= peak <= 1.25 * size


def test_gate_of_gpt_oss():
    x, gate_up, down, index, weights = _args(2, 70, 256, 128, 8, 2)
    more = {"activation": "gpt_oss", "interleaved": True}
    more |= {
        "gate_up_bias": torch.randn(8, 256, device="cuda").to(BF16),
        "down_bias": torch.randn(8, 256, device="cuda").to(BF16),
    }

    def ours(x, gate_up, down, index, weights):
        return opake_moe(x, gate_up.mT.contiguous(), down.mT.contiguous(), index, weights, transposed=True, **more)

    def twin(*args):
        wide = {name: v.to(args[0].dtype) if isinstance(v, torch.Tensor) else v for name, v in more.items()}
        return moe_reference(*args, **wide)

    args = (x, gate_up, down, index, weights)
    exact = _plain(twin, *[t.double() if t.is_floating_point() else t for t in args])
    for got, same, want in zip(_plain(ours, *args), _plain(twin, *args), exact, strict=True):
        assert (got - want).norm() <= 2 * (same - want).norm() + 1e-3 * want.norm()


def test_a_row_does_not_see_its_neighbours():
    x, gate_up, down, index, weights = _args(4, 200, 512, 256, 16, 4)
    want = _per_example(x, gate_up, down, index, weights)
    again = _per_example(x, gate_up, down, index, weights)
    others = _args(4, 200, 512, 256, 16, 4, seed=1)
    x2, index2, weights2 = others[0], others[3], others[4]
    index2[0] = 3
    x2[2], index2[2], weights2[2] = x[2], index[2], weights[2]
    got = _per_example(x2, gate_up, down, index2, weights2)
    for a, b, c in zip(want, again, got, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a[2], c[2])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_memory_and_no_read_on_the_host():
    """Frozen experts at Qwen3-30B-A3B sizes, an eighth of the tokens: outputs and the sorted rows, nothing else."""
    args = _args(2, 512, 2048, 768, 128, 8)
    _plain(opake_moe, *args, stacks=False)

    def unread():
        try:
            torch.cuda.set_sync_debug_mode("error")
            _plain(opake_moe, *args, stacks=False)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    assert peak_gib(unread) <= 128 / 1024


def test_capture():
    args = _args(2, 128, 512, 256, 16, 4)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        want = _per_example(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = _per_example(*args)
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a, b)


def test_rows_beyond_int32():
    """More than 2^31 numbers in the rows of all choices."""
    B, T, H, I, E, K = 1, 2**18 + 64, 1024, 32, 16, 8
    args = _args(B, T, H, I, E, K)
    assert T * K * H > 2**31
    found = _plain(opake_moe, *args, stacks=False)
    for rows in (slice(0, 8), slice(T - 8, T)):
        part = [args[0][:, rows], *args[1:3], args[3][:, rows], args[4][:, rows]]
        want = moe_reference(*[t.double() if t.is_floating_point() else t for t in part])[0]
        assert (found[0][rows] - want).norm() <= 0.02 * want.norm()
