"""`BranchedLoRALinear`: a LoRA layer as two branches, one with the base product and one with the adapter.

What the two kinds of it have in common: how the branches are asked for, and what cannot be asked for. What a branch is
made of is said by a subclass.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from opake.errors import InputError

from .adapter import LinearAdapter
from .linear import LoRALinear
from .norm_linear import NORMS


class BranchedLoRALinear(LoRALinear):
    """Base of the LoRA layers that are made of a main branch and a LoRA branch.

    A subclass says which classes it wraps, in `_wrapped`, and makes the branches in `_main_branch` and `_lora_branch`.
    """

    def _make_fused_branches(self) -> tuple[Any, Any]:
        """(main branch, LoRA branch)."""
        require_plain(self.to_wrap, self.adapter, self._wrapped())
        layer: Any = self.to_wrap
        mode, group, sequence = parallelism(layer)
        made: Any = {
            "in_features": layer.in_features,
            "out_features": layer.out_features,
            "tensor_parallel_mode": mode,
            "tensor_parallel_group": group,
            "sequence_parallel": sequence,
            "accumulate_into_main_grad": bool(getattr(layer, "fuse_wgrad_accumulation", False)),
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
        self._require_sizes(in_features, out_features)
        return self._main_branch(accumulate_into_main_grad)

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
        self._require_sizes(in_features, out_features)
        return self._lora_branch(accumulate_into_main_grad)

    @classmethod
    def _wrapped(cls) -> tuple[type, ...]:
        """The classes of layers that can be wrapped."""
        raise NotImplementedError

    def _main_branch(self, accumulate: bool) -> Any:
        raise NotImplementedError

    def _lora_branch(self, accumulate: bool) -> Any:
        raise NotImplementedError

    def _require_sizes(self, in_features: int, out_features: int) -> None:
        layer: Any = self.to_wrap
        if (in_features, out_features) != (layer.in_features, layer.out_features):
            raise InputError(
                f"the branch is to map {in_features} to {out_features}, but {type(layer).__name__} maps "
                f"{layer.in_features} to {layer.out_features}"
            )


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


def parallelism(layer: Any) -> tuple[str | None, Any | None, bool]:
    """(mode, group, sequence parallel) of a layer that is split between devices; None, None, False of any other."""
    if getattr(layer, "tp_size", 1) == 1:
        return None, None, False
    return layer.parallel_mode, layer.tp_group, bool(getattr(layer, "sequence_parallel", False))
