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

from opake.errors import InputError
from opake_kernels.lora import opake_lora_w

from .adapter import LinearAdapter
from .layers import Projection, base_projection, hooked
from .linear import LoRALinear
from .norm_linear import NORMS, LayerNormLinear
from .outputs import product_of
from .own import with_adapter

WRAPPED = (nn.Linear, LayerNormLinear)


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


class FusedLoRALinear(LoRALinear):
    """A `LoRALinear` that always answers (out, None), its norm, product and adapter in one op where possible.

    to_wrap: an nn.Linear or a `LayerNormLinear`; the bias is added inside. adapter: a `LinearAdapter`.

    Raises InputError (a ValueError) for any other wrapped class, adapter or normalisation, NotImplementedError for
    tensor or sequence parallelism.
    """

    def __init__(self, to_wrap: nn.Module, adapter: nn.Module) -> None:
        require_plain(to_wrap, adapter, WRAPPED)
        super().__init__(to_wrap, adapter)

    def _make_fused_branches(self) -> tuple[Any, Any]:
        """(main branch, LoRA branch)."""
        require_plain(self.to_wrap, self.adapter, WRAPPED)
        layer: Any = self.to_wrap
        made: Any = {
            "in_features": layer.in_features,
            "out_features": layer.out_features,
            "tensor_parallel_mode": None,
            "tensor_parallel_group": None,
            "sequence_parallel": False,
            "accumulate_into_main_grad": False,
        }
        return self._make_main_branch(**made), self._make_lora_branch(**made)

    def _make_main_branch(
        self,
        *,
        in_features: int,
        out_features: int,
        tensor_parallel_mode: str | None,
        tensor_parallel_group: Any | None,
        sequence_parallel: bool,
        accumulate_into_main_grad: bool,
    ) -> Any:
        """Norm, fork and linear layer."""
        require_no_parallelism(tensor_parallel_mode, tensor_parallel_group, sequence_parallel)
        _require_autograd(accumulate_into_main_grad)
        self._require_sizes(in_features, out_features)
        return MainBranch(self.to_wrap)

    def _make_lora_branch(
        self,
        *,
        in_features: int,
        out_features: int,
        tensor_parallel_mode: str | None,
        tensor_parallel_group: Any | None,
        sequence_parallel: bool,
        accumulate_into_main_grad: bool,
    ) -> Any:
        """linear_in, linear_out and the addition."""
        require_no_parallelism(tensor_parallel_mode, tensor_parallel_group, sequence_parallel)
        _require_autograd(accumulate_into_main_grad)
        self._require_sizes(in_features, out_features)
        adapter: Any = self.adapter
        return LoRABranch(adapter)

    def _require_sizes(self, in_features: int, out_features: int) -> None:
        layer: Any = self.to_wrap
        if (in_features, out_features) != (layer.in_features, layer.out_features):
            raise InputError(
                f"the branch is to map {in_features} to {out_features}, but {type(layer).__name__} maps "
                f"{layer.in_features} to {layer.out_features}"
            )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        main, lora = self._make_fused_branches()
        if not self._adapter_enabled:
            return main(x)[0], None
        found = self._whole()
        if isinstance(found, str) or torch.compiler.is_compiling():
            product, rows = main(x)
            return lora(rows, product), None
        rows = main.norm(x)
        return opake_lora_w(rows, found.W, found.A, found.B, found.scaling, found.bias), None

    def _whole(self) -> Projection | str:
        """Base product and adapter as one projection, or why they are two."""
        if hooked(self.to_wrap):
            return "there is a hook on the base layer"
        base = base_projection(self.to_wrap, nn.Linear, LayerNormLinear)
        return base if isinstance(base, str) else with_adapter(base, self.adapter)


def require_plain(layer: nn.Module, adapter: nn.Module, wrapped: tuple[type, ...]) -> None:
    """Raise InputError unless the layer, its norm and the adapter are of the kinds that can be fused."""
    if not isinstance(layer, wrapped):
        names = ", ".join(f"{each.__module__.partition('.')[0]}.{each.__name__}" for each in wrapped)
        raise InputError(f"unsupported class for the wrapped linear: {type(layer).__name__}; it takes {names}")
    norm = getattr(layer, "normalization", None)
    if norm is not None and norm not in NORMS:
        raise InputError(f"unsupported normalization {norm!r}; it takes {' or '.join(NORMS)}")
    if not isinstance(adapter, LinearAdapter):
        raise InputError(f"unsupported class for the LoRA adapter: {type(adapter).__name__}; it takes LinearAdapter")


def require_no_parallelism(mode: str | None, group: Any | None, sequence_parallel: bool) -> None:
    """Raise NotImplementedError for a branch that is to be split between devices."""
    if mode is not None or group is not None or sequence_parallel:
        raise NotImplementedError(
            f"tensor_parallel_mode={mode!r}, tensor_parallel_group={group!r}, sequence_parallel={sequence_parallel!r}: "
            "LoRA branches are not split between devices; leave them None and False"
        )


def _require_autograd(accumulate_into_main_grad: bool) -> None:
    if accumulate_into_main_grad:
        raise NotImplementedError(
            "accumulate_into_main_grad=True: gradients are those of autograd, in .grad; leave it False"
        )
