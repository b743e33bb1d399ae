"""`LoRATopKRouter`: a mixture-of-experts router whose logits have an adapter's term, before anything is chosen."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from opake.errors import InputError, PatchError

from .gating import AddToLogits, gating_module
from .wrapper import AdapterWrapper

MEGATRON = ("apply_input_jitter", "gating", "routing")


class LoRATopKRouter(AdapterWrapper):
    """logits = gating(x) + adapter(x), and the router's own routing of the sum.

    The term is inside softmax or sigmoid, top-k, z-loss and auxiliary loss. A jitter of the input is drawn once, by
    whoever draws it, and base and adapter see the same rows. An expert bias that is added after the logits affects the
    selection only. Routers of Transformers are called as modules, so what records router logits records the sum.

    to_wrap: a router with a weight (E, H) of its own or in a single linear layer, or one of Megatron's form, with
    `apply_input_jitter`, `gating` and `routing`
    adapter: (..., H) -> (..., E), e.g. `LinearAdapter(router)`

    Raises InputError where the router has no single gating weight or the adapter does not fit it, and PatchError in a
    forward that makes its logits in a way that is not recognised.
    """

    def __init__(self, to_wrap: nn.Module, adapter: nn.Module) -> None:
        if not _is_megatron(to_wrap):
            _require_fit(to_wrap, adapter)
        super().__init__(to_wrap, adapter)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _is_megatron(self.to_wrap):
            return self._gate_and_route(x, *args, **kwargs)
        if not self._adapter_enabled:
            return self.to_wrap(x, *args, **kwargs)
        holder = gating_module(self.to_wrap)[1]
        weight: Any = holder._parameters["weight"]
        with AddToLogits(weight, self._delta) as added:
            result = self.to_wrap(x, *args, **kwargs)
        if added.times != 1:
            raise PatchError(
                f"{type(self.to_wrap).__name__} multiplied by its weight {added.times} times in one forward, expected "
                "once and by torch.nn.functional.linear; disable its adapter, or wrap the layer that makes the logits"
            )
        return _with_own_indices(result)

    def _delta(self, rows: torch.Tensor) -> torch.Tensor:
        return self.adapter_forward(self.adapter, rows.contiguous())

    def _gate_and_route(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        router: Any = self.to_wrap
        if hasattr(router, "_maintain_float32_expert_bias"):
            router._maintain_float32_expert_bias()
        rows = router.apply_input_jitter(x)
        logits = router.gating(rows)
        if self._adapter_enabled:
            logits = logits + self._delta(rows).to(logits.dtype)
        if getattr(getattr(router, "config", None), "moe_router_force_load_balancing", False):
            logits = torch.randn_like(logits)
        return router.routing(logits, *args, **kwargs)


def _with_own_indices(result: Any) -> Any:
    """The answer with copies of its integers: some experts write into the indices, which backward still needs."""
    if type(result) is not tuple:
        return result
    return tuple(
        each.clone() if isinstance(each, torch.Tensor) and not each.is_floating_point() else each for each in result
    )


def _is_megatron(router: nn.Module) -> bool:
    return all(hasattr(router, name) for name in MEGATRON)


def _require_fit(router: nn.Module, adapter: nn.Module) -> None:
    holder: Any = gating_module(router)[1]
    want = (holder.weight.shape[1], holder.weight.shape[0])
    got = (getattr(adapter, "in_features", want[0]), getattr(adapter, "out_features", want[1]))
    if got != want:
        raise InputError(
            f"{type(router).__name__} maps {want[0]} to {want[1]} experts and the adapter {got[0]} to {got[1]}; "
            "make it of the router, LinearAdapter(router)"
        )
