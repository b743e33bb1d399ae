"""The op beside Transformers' own functions: errors against float64 at most twice theirs in the same dtype."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from opake import hf
from opake_kernels.moe import Choice, moe_reference, op, opake_moe

H, I, T = 32, 48, 60
PATTERNS = {
    "any": (6, 2),
    "one takes all": (6, 2),
    "some are empty": (8, 2),
    "one choice": (5, 1),
    "all choices": (4, 4),
    "a number that is no power of two": (7, 3),
    "one token": (8, 2),
}


class Stock(torch.nn.Module):
    """What Transformers' functions read of a module of experts."""

    has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True
    _is_expert_parallel = has_post_expert_norm = False

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up, down  # pyright: ignore
        self.num_experts, self.act_fn = len(down), functional.silu

    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return self.act_fn(gate) * up


def _args(kind: str, dtype: torch.dtype) -> list[torch.Tensor]:
    E, K = PATTERNS[kind]
    tokens = 1 if kind == "one token" else T
    scores = torch.randn(tokens, E)
    if kind == "one takes all":
        scores[:, 3] += 100
    if kind == "some are empty":
        scores[:, ::2] -= 100
    weights, index = scores.softmax(-1).topk(K, -1)
    stacks = [torch.randn(E, 2 * I, H) * H**-0.5, torch.randn(E, H, I) * I**-0.5]
    return [torch.randn(tokens, H).to(dtype), *(w.to(dtype) for w in stacks), index, (weights + 0.1).to(dtype)]


def _results(fn, args: list[torch.Tensor]) -> list[torch.Tensor]:
    x, gate_up, down, index, weights = args
    leaves = [t.detach().requires_grad_() for t in (x, gate_up, down, weights)]
    y = fn(*leaves[:3], index, leaves[3])
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.cos(torch.arange(y.numel())).view(y.shape).to(y.dtype))]


def _stock(x, gate_up, down, index, weights):
    return hf.experts_functions()["grouped_mm"](Stock(gate_up, down), x, index, weights)


def _squares(got: list[torch.Tensor], exact: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([(a.double() - b).square().sum() for a, b in zip(got, exact, strict=True)])


@pytest.mark.parametrize("path", ["dense", "grouped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", PATTERNS)
def test_errors(kind: str, dtype: torch.dtype, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the result, of tokens, stacks and routing weights, over several draws."""
    monkeypatch.setattr(op, "choose", lambda *_, **__: Choice(path, "asked for"))
    torch.manual_seed(0)
    ours, theirs = torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    for _ in range(16 if kind == "one token" else 3):
        args = _args(kind, dtype)
        exact = _results(moe_reference, [t.double() if t.is_floating_point() else t for t in args])
        ours += _squares(_results(opake_moe, args), exact)
        theirs += _squares(_results(_stock, args), exact)
    assert (ours.sqrt() <= 2 * theirs.sqrt()).all(), (ours / theirs).sqrt()
