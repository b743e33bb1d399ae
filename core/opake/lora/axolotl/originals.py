"""The projections of an attention module without any kernel: what the fused ones are compared with.

Also for modules with one combined projection, where its layout is known.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from opake.errors import ProjectionsNotFound
from opake.lora.canonical import COMBINED, parts_of
from opake.lora.wrapper import AdapterWrapper

QKV = ("q_proj", "k_proj", "v_proj")
OUTPUTS = ("o_proj", "out_proj", "c_proj", "dense", "wo", "proj", "output_proj", "Wo", "out", "linear_out", "o_b_proj")
OUTPUTS += ("attention_out",)


def original_apply_qkv(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(query, key, value) of an attention module, each projection called as the module that it is.

    self: the attention module. hidden_states: (B, T, H); (T, H) too. Where value shares the projection of key, it is
    key. Raises ProjectionsNotFound (an AssertionError) for a module without such projections.
    """
    found = self._modules
    if found.get("q_proj") is not None and found.get("k_proj") is not None:
        query, key = self.q_proj(hidden_states), self.k_proj(hidden_states)
        return query, key, self.v_proj(hidden_states) if found.get("v_proj") is not None else key
    name = next((name for name in COMBINED if found.get(name) is not None), None)
    parts = None if name is None else parts_of(self, name, _bare(found[name]))
    if name is None or parts is None or len(parts) != 3:
        raise ProjectionsNotFound(
            f"{type(self).__name__} has no {', '.join(QKV)} and no combined projection of a known layout, but "
            f"{', '.join(found) or 'no submodules'}; call its projections yourself"
        )
    query, key, value = getattr(self, name)(hidden_states).split(list(parts.values()), dim=-1)
    return query, key, value


def original_apply_o(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """The output projection of an attention module.

    self: the attention module. hidden_states: (B, T, width of all heads). Raises ProjectionsNotFound (an
    AssertionError) for a module without one.
    """
    name = output_name(self)
    if name is None:
        raise ProjectionsNotFound(
            f"{type(self).__name__} has no output projection ({', '.join(OUTPUTS[:4])}, ...), but "
            f"{', '.join(self._modules) or 'no submodules'}; call its projection yourself"
        )
    return getattr(self, name)(hidden_states)


def output_name(module: nn.Module) -> str | None:
    """The name of the output projection of an attention module."""
    return next((name for name in OUTPUTS if module._modules.get(name) is not None), None)


def _bare(layer: Any) -> nn.Module:
    """The linear layer inside an adapter, PEFT's or one of our own."""
    return layer.to_wrap if isinstance(layer, AdapterWrapper) else layer._modules.get("base_layer", layer)
