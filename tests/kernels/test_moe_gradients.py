"""Backward of the experts: memory of weight gradients, cotangents that are mapped alone, two runs bit for bit."""

import gc

import pytest
import torch
from torch.func import vjp, vmap

from opake.testing.live import LiveBytes
from opake_kernels.moe import Choice, moe_reference, op, opake_moe

E, K, H, I = 6, 2, 16, 32


@pytest.fixture(params=["dense", "grouped", "fused"])
def path(request, monkeypatch, device):
    if request.param == "grouped" and device == "cuda":
        pytest.skip("grouped_mm on CUDA is for bfloat16")
    monkeypatch.setattr(op, "choose", lambda *_, **__: Choice(request.param, "asked for"))
    return request.param


def _args(device, B, T):
    scores = torch.randn(B, T, E, device=device)
    weights, index = scores.softmax(-1).topk(K, -1)
    stacks = torch.randn(E, 2 * I, H, device=device) / 4, torch.randn(E, H, I, device=device) / 4
    return torch.randn(B, T, H, device=device), *stacks, index, weights


class Reachable(LiveBytes):
    """Without what Triton's interpreter leaves in reference cycles, whenever the collector would run."""

    def now(self) -> int:
        if super().now() > self.peak:
            gc.collect()
        return super().now()


def test_gradients_of_stacks_are_made_in_place(path, device):
    """Those of each example need their own memory, and of anything else no more than a part of it."""
    B = 12
    x, gate_up, down, index, weights = _args(device, B, 4)
    stacks = [w.expand(B, *w.shape).requires_grad_() for w in (gate_up, down)]
    y = opake_moe(x, *stacks, index, weights)
    with Reachable() as live:
        grads = torch.autograd.grad(y.sum(), stacks)
    size = sum(g.numel() * g.element_size() for g in grads)
    assert [g.shape for g in grads] == [s.shape for s in stacks]
    assert size <= live.peak <= 1.25 * size


@pytest.mark.parametrize("own", [False, True])
def test_cotangents_mapped_alone(path, own, device):
    """What forward kept for backward has no mapped dimension then, and gains one."""
    B, C = 3, 2
    x, gate_up, down, index, weights = _args(device, B, 5)
    stacks = [torch.stack([w * (1 + b) for b in range(B)]) for w in (gate_up, down)] if own else [gate_up, down]
    d = torch.randn(C, *x.shape, device=device)

    def run(fn):
        _, back = vjp(lambda x, w, g, u: fn(x, g, u, index, w), x, weights, *stacks)
        return vmap(back)(d)

    def twin(x, gate_up, down, index, weights):
        if own:
            return vmap(moe_reference)(x, gate_up, down, index, weights)
        return moe_reference(x, gate_up, down, index, weights)

    for ours, theirs in zip(run(opake_moe), run(twin), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


def test_examples_and_cotangents(path, device):
    """Two mapped dimensions in either order: examples, then cotangents, of which one is known to forward."""
    x, gate_up, down, index, weights = _args(device, 3, 5)
    d = torch.randn(3, 2, 5, H, device=device)

    def run(fn):
        def one(x, w, i, d):
            _, back = vjp(lambda x, w, g: fn(x, g, down, i, w), x, w, gate_up)
            return vmap(back)(d)

        return vmap(one)(x, weights, index, d)

    for ours, theirs in zip(run(opake_moe), run(moe_reference), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("K", [1, 3, 6])
def test_two_runs_are_equal(path, K, device):
    """Bit for bit, in every result, of an ordinary batch and of its examples."""
    x, gate_up, down, index, weights = _args(device, 2, 4)
    weights, index = torch.randn(2, 4, E, device=device).softmax(-1).topk(K, -1)

    def plain():
        leaves = [t.detach().requires_grad_() for t in (x, weights, gate_up, down)]
        y = opake_moe(leaves[0], *leaves[2:], index, leaves[1])
        return [y, *torch.autograd.grad(y.square().sum(), leaves)]

    def examples():
        def one(x, w, i):
            y, back = vjp(lambda x, w, g, d: opake_moe(x, g, d, i, w), x, w, gate_up, down)
            return y, *back(y)

        return vmap(one)(x, weights, index)

    for run in (plain, examples):
        for first, second in zip(run(), run(), strict=True):
            assert torch.equal(first, second)


def test_an_expert_out_of_range_reaches_its_own_tokens_alone(path, device):
    """Whatever is computed beside what was chosen, no infinity of it is seen, in results or gradients."""
    x, gate_up, down, index, weights = _args(device, 2, 6)
    index[0], index[1] = torch.tensor([1, 2], device=device), torch.tensor([0, 3], device=device)
    want = _all_gradients(x, gate_up, down, index, weights)
    gate_up[4:] *= 1e30
    x[1, 2] = float("nan")
    got = _all_gradients(x, gate_up, down, index, weights)
    for ours, clean in zip(got, want, strict=True):
        assert torch.equal(ours[0], clean[0])
    for rows in got[:3]:
        assert rows[1].isnan().flatten(1).any(1).tolist() == [False, False, True, False, False, False]
    for stack in got[3:]:
        assert stack[1].isnan().flatten(1).any(1).tolist() == [True, False, False, True, False, False]


def _all_gradients(x, gate_up, down, index, weights):
    def one(x, w, i):
        y, back = vjp(lambda x, w, g, d: opake_moe(x, g, d, i, w), x, w, gate_up, down)
        return y, *back(torch.ones_like(y))

    return vmap(one)(x, weights, index)
