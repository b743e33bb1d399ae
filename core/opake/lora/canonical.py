"""Separate adapters for the projections that a combined linear layer computes at once.

Phi-3's `qkv_proj` and GPT-2's `c_attn` hold query, key and value, `gate_up_proj` holds gate and up. One adapter over
them shares its A among all; canonical adapters are those that separate layers would have, under the names that separate
layers would have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from opake.rows import gated_mlp

from .adapter import LinearAdapter
from .shapes import shape_of

Parts = dict[str, int]


class CanonicalAdapter(nn.Module):
    """The differences of some parts of a combined layer, side by side; zero for a part without an adapter.

    orig_linear: the combined layer. parts: the rows of its output that each part has, in order, e.g.
    `{"q_proj": 32, "k_proj": 16, "v_proj": 16}`. adapters: those of the parts that have one.
    """

    def __init__(self, orig_linear: nn.Module, parts: Mapping[str, int], adapters: Mapping[str, LinearAdapter]) -> None:
        super().__init__()
        shape = shape_of(orig_linear)
        self.in_features, self.out_features = shape.in_features, shape.out_features
        self.parts: Parts = dict(parts)
        for name, adapter in adapters.items():
            self.add_module(name, adapter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = {name: adapter(x) for name, adapter in self._modules.items() if adapter is not None}
        like = next(iter(made.values()))
        empty = {name: like.new_zeros(()).expand(*x.shape[:-1], rows) for name, rows in self.parts.items()}
        return torch.cat([made.get(name, empty[name]) for name in self.parts], -1)

    def delta_weight(self) -> torch.Tensor:
        """What the adapters add to the weight of the combined layer, (out, in)."""
        made: dict[str, Any] = {name: a.delta_weight() for name, a in self._modules.items() if a is not None}  # type: ignore[operator]
        like = next(iter(made.values()))
        return torch.cat(
            [made[n] if n in made else like.new_zeros(rows, self.in_features) for n, rows in self.parts.items()]
        )


def parts_of(owner: nn.Module, name: str, layer: nn.Module) -> Parts | None:
    """The parts of `owner.name`, a combined layer of a kind that is known to lay them side by side; None for others."""
    rule = _RULES.get((type(owner).__name__, name))
    if rule is None and name == "gate_up_proj" and gated_mlp.fits(None, owner) is None:  # type: ignore[arg-type]
        rule = _halves
    parts = None if rule is None else rule(owner, layer)
    return parts if parts is not None and sum(parts.values()) == shape_of(layer).out_features else None


def _qkv(owner: Any, layer: nn.Module) -> Parts | None:
    config = owner.config
    width = owner.head_dim
    keys = config.num_key_value_heads * width
    return {"q_proj": config.num_attention_heads * width, "k_proj": keys, "v_proj": keys}


def _thirds(owner: Any, layer: nn.Module) -> Parts | None:
    if getattr(owner, "is_cross_attention", False):
        return None
    return dict.fromkeys(("q_proj", "k_proj", "v_proj"), shape_of(layer).out_features // 3)


def _halves(owner: Any, layer: nn.Module) -> Parts | None:
    return dict.fromkeys(("gate_proj", "up_proj"), shape_of(layer).out_features // 2)


_RULES: dict[tuple[str, str], Callable[[Any, nn.Module], Parts | None]] = {
    ("Phi3Attention", "qkv_proj"): _qkv,
    ("Phi4MultimodalAttention", "qkv_proj"): _qkv,
    ("GPT2Attention", "c_attn"): _thirds,
    ("ImageGPTAttention", "c_attn"): _thirds,
    ("DecisionTransformerGPT2Attention", "c_attn"): _thirds,
}
COMBINED = ("qkv_proj", "gate_up_proj", "c_attn", "query_key_value", "Wqkv", "qkv", "in_proj_qkvz")
