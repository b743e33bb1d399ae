"""`TEFusedLoRALinear`: the two branches of `FusedLoRALinear` in Transformer Engine's operation fuser.

The branches share the parameters of the layers; they are built at the first forward, and again when a parameter was
replaced. Transformer Engine is imported when a layer is made. The LoRA branch never runs in fp8.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

import torch
from torch import nn

from opake.errors import MissingDependency
from opake.patching.instance import hooked
from opake.transforms import inside_transform

from .adapter import LinearAdapter
from .branches import BranchedLoRALinear, parallelism, require_no_parallelism, require_plain
from .outputs import product_of


class TEFusedLoRALinear(BranchedLoRALinear):
    """A `LoRALinear` on Transformer Engine's fused operations; answers (out, None).

    to_wrap: te.Linear, te.LayerNormLinear or nn.Linear. adapter: a `LinearAdapter`. Disabled, with hooks on the layers
    inside or subclasses in their places, under `functional_call` and inside transforms, of which Transformer Engine
    knows nothing, it is a plain `LoRALinear` whose answer is put in the same form.

    Raises MissingDependency (an ImportError) without Transformer Engine, InputError (a ValueError) for another wrapped
    class, adapter or normalisation, NotImplementedError for tensor parallelism.
    """

    def __init__(self, to_wrap: nn.Module, adapter: nn.Module) -> None:
        require_plain(to_wrap, adapter, self._wrapped())
        require_no_parallelism(*parallelism(to_wrap))
        super().__init__(to_wrap, adapter)
        # in a tuple, so that the branches are no submodules and their parameters are not listed twice
        self._fused_branches: tuple[Any, ...] = ()
        self._fused_parameters: tuple[Any, ...] = ()

    @classmethod
    def _wrapped(cls) -> tuple[type, ...]:
        _ops()
        te = _import("transformer_engine.pytorch")
        return te.Linear, te.LayerNormLinear, nn.Linear

    def _main_branch(self, accumulate: bool) -> Any:
        """A te.ops.Sequential on the parameters of `to_wrap`."""
        ops, layer = _ops(), self.to_wrap
        branch = ops.Sequential()
        if getattr(layer, "normalization", None) is not None:
            branch.append(_norm(ops, layer))
            branch.append(ops.Quantize(forward=True, backward=False))
        # the gradient of the fork is accumulated by the backward product
        branch.append(ops.MakeExtraOutput(in_place=True))
        weight: Any = layer.weight
        bias: Any = getattr(layer, "bias", None)
        # Transformer Engine keeps an empty tensor where there is no bias
        bias = bias if bias is not None and bias.numel() else None
        branch.append(_linear(ops, weight, bias, accumulate))
        return branch

    def _lora_branch(self, accumulate: bool) -> Any:
        """A te.ops.Sequential on the adapter's parameters: its two products, scale and dropout, and the addition."""
        ops, adapter = _ops(), cast(LinearAdapter, self.adapter)
        dropout = adapter.dropout.p if isinstance(adapter.dropout, nn.Dropout) else 0.0
        branch = ops.Sequential()
        if dropout and adapter.dropout_position == "pre":
            branch.append(ops.Dropout(dropout))
        for part in (adapter.linear_in, adapter.linear_out):
            weight: Any = part.weight
            # an adapter that Megatron does not know has no main gradient to add to
            branch.append(_linear(ops, weight, None, accumulate and hasattr(weight, "main_grad")))
        if adapter.scale != 1:
            branch.append(ops.ConstantScale(adapter.scale))
        if dropout and adapter.dropout_position == "post":
            branch.append(ops.Dropout(dropout))
        branch.append(ops.AddExtraInput(in_place=True))
        return branch

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        parameters = tuple(self.parameters())
        plain = self._adapter_enabled and self._is_usual() and not self._is_hooked()
        if not plain or inside_transform() or not _all_real(parameters):
            return product_of(super().forward(x)), None
        if len(parameters) != len(self._fused_parameters) or any(
            now is not then for now, then in zip(parameters, self._fused_parameters, strict=True)
        ):
            self._fused_branches, self._fused_parameters = self._make_fused_branches(), parameters
        main, lora = self._fused_branches
        for branch in (main, lora):
            branch.train(self.training)
        product, rows = main(x)
        with _without_fp8():
            return lora(rows, product), None

    def _is_usual(self) -> bool:
        """Whether layer and adapter compute what their weights say: no subclass, no other parts."""
        adapter: Any = self.adapter
        parts, drop = (adapter.linear_in, adapter.linear_out), adapter.dropout
        usual = self.fuse and type(self.to_wrap) in self._wrapped() and type(adapter) is LinearAdapter
        return usual and type(drop) in (nn.Identity, nn.Dropout) and all(_is_bare(part) for part in parts)

    def _is_hooked(self) -> bool:
        return hooked(self.to_wrap) or any(hooked(module) for module in self.adapter.modules())

    def __getstate__(self) -> dict[str, Any]:
        # branches are rebuilt from the parameters of the copy
        return {**super().__getstate__(), "_fused_branches": (), "_fused_parameters": ()}


def _is_bare(part: nn.Module) -> bool:
    return type(part) is nn.Linear and part.bias is None


def _all_real(parameters: tuple[Any, ...]) -> bool:
    """Whether these are the module's own parameters, and no tensors that `functional_call` put in their places."""
    return all(isinstance(parameter, nn.Parameter) for parameter in parameters)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependency(
            f"TEFusedLoRALinear needs Transformer Engine with its operation fuser, and {name} does not import "
            f"({error}); pip install 'opake[te]', or use FusedLoRALinear, which needs torch alone"
        ) from error


def _ops() -> Any:
    return _import("transformer_engine.pytorch.ops")


def _without_fp8() -> Any:
    te = _import("transformer_engine.pytorch")
    # the newer name first
    switch = getattr(te, "autocast", None) or te.fp8_autocast
    return switch(enabled=False)


def _norm(ops: Any, layer: Any) -> Any:
    kind = getattr(ops, layer.normalization)
    op = kind(
        layer.in_features,
        eps=layer.eps,
        device="meta",
        dtype=layer.layer_norm_weight.dtype,
        zero_centered_gamma=layer.zero_centered_gamma,
    )
    op.weight = layer.layer_norm_weight
    if layer.normalization == "LayerNorm":
        op.bias = layer.layer_norm_bias
    return op


def _linear(ops: Any, weight: torch.Tensor, bias: torch.Tensor | None, accumulate: bool) -> Any:
    op = ops.Linear(
        weight.shape[1],
        weight.shape[0],
        bias=bias is not None,
        device="meta",
        dtype=weight.dtype,
        tensor_parallel_mode=None,
        tensor_parallel_group=None,
        sequence_parallel=False,
        accumulate_into_main_grad=accumulate,
    )
    op.weight = weight
    if bias is not None:
        op.bias = bias
    return op
