"""`FusedLoRALinear`: norm, fork, and a base product that accumulates the LoRA branch, as one op.

Two branches, as in Transformer Engine's operation fuser: the main one normalises, forks and multiplies, the LoRA branch
takes the fork and adds to the product. Where nothing stands between them they are one call of `opake_lora_w`; with
dropout, a trainable base weight or hooks the branches run one after the other. Leaves out tensor parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from opake.patching.instance import hooked
from opake_kernels.lora import opake_lora_w

from .adapter import LinearAdapter
from .branches import BranchedLoRALinear, require_plain
from .layers import Projection, base_projection, traced
from .norm_linear import LayerNormLinear
from .outputs import product_of
from .own import with_adapter


class MainBranch:
    """x -> (base product, its input): the norm if there is one, the fork, the linear layer."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer.normalised(x) if isinstance(self.layer, LayerNormLinear) else x

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.norm(x)
        if isinstance(self.layer, LayerNormLinear) and not hooked(self.layer):
            bias: Any = self.layer.bias
            return functional.linear(rows, self.layer.weight, bias), rows
        return product_of(self.layer(x)), rows


class LoRABranch:
    """(input of the base product, product) -> product plus the adapter's term."""

    def __init__(self, adapter: LinearAdapter) -> None:
        self.adapter = adapter

    def __call__(self, rows: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        return product + self.adapter(rows).to(product.dtype)


class FusedLoRALinear(BranchedLoRALinear):
    """A `LoRALinear` that always answers (out, None), its norm, product and adapter in one op where possible.

    to_wrap: an nn.Linear or a `LayerNormLinear`; the bias is added inside. adapter: a `LinearAdapter`.

    Raises InputError (a ValueError) for any other wrapped class, adapter or normalisation, NotImplementedError for
    tensor or sequence parallelism.
    """

    def __init__(self, to_wrap: nn.Module, adapter: nn.Module) -> None:
        require_plain(to_wrap, adapter, self._wrapped())
        super().__init__(to_wrap, adapter)

    @classmethod
    def _wrapped(cls) -> tuple[type, ...]:
        return nn.Linear, LayerNormLinear

    def _main_branch(self, accumulate: bool) -> MainBranch:
        _require_autograd(accumulate)
        return MainBranch(self.to_wrap)

    def _lora_branch(self, accumulate: bool) -> LoRABranch:
        _require_autograd(accumulate)
        adapter: Any = self.adapter
        return LoRABranch(adapter)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        main, lora = self._make_fused_branches()
        if not self._adapter_enabled:
            return main(x)[0], None
        found = self._whole()
        if isinstance(found, str) or traced():
            product, rows = main(x)
            return lora(rows, product), None
        rows = main.norm(x)
        return opake_lora_w(rows, found.W, found.A, found.B, found.scaling, found.bias), None

    def _whole(self) -> Projection | str:
        """Base product and adapter as one projection, or why they are two."""
        if not self.fuse:
            return "fusing is switched off"
        if hooked(self.to_wrap):
            return "there is a hook on the base layer"
        base = base_projection(self.to_wrap, LayerNormLinear)
        return base if isinstance(base, str) else with_adapter(base, self.adapter)


def _require_autograd(accumulate_into_main_grad: bool) -> None:
    if accumulate_into_main_grad:
        raise NotImplementedError(
            "accumulate_into_main_grad=True: gradients are those of autograd, in .grad; leave it False"
        )
