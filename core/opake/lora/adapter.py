"""`LinearAdapter`: the low-rank difference that LoRA adds to a linear layer, and nothing of the layer itself.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import nn

from opake.errors import InputError
from opake_kernels.launch import autocasting

from .shapes import shape_of


class LinearAdapter(nn.Module):
    """x -> scale * linear_out(linear_in(x)), scale = alpha / dim, beside a layer whose weights are not copied.

    orig_linear: an nn.Linear, a Conv1D or a router with a bare weight (out, in); its shape, dtype and device are taken
    dim: the rank R; linear_in has a weight (R, in), linear_out (out, R), neither a bias
    alpha: numerator of the scale; fractions are allowed
    dropout: probability, on the input (`dropout_position="pre"`) or on the difference (`"post"`)
    lora_A_init_method: `"xavier"` or `"uniform"` (Kaiming with slope sqrt 5); linear_out starts at zero
    lora_dtype: dtype of the two weights; None is that of the layer

    Takes (..., in) of any floating dtype and returns (..., out) in it; the products run in the adapter's own dtype, or
    in that of autocast. Raises InputError (a ValueError) for a choice that does not exist.
    """

    def __init__(
        self,
        orig_linear: nn.Module,
        dim: int = 8,
        alpha: float = 32,
        dropout: float = 0.0,
        dropout_position: Literal["pre", "post"] = "pre",
        lora_A_init_method: Literal["xavier", "uniform"] = "xavier",
        lora_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        shape = shape_of(orig_linear)
        self.in_features, self.out_features = shape.in_features, shape.out_features
        self._init_adapter(
            dim, alpha, dropout, dropout_position, lora_A_init_method, lora_dtype, shape.device, shape.dtype
        )

    @classmethod
    def for_shape(cls, in_features: int, out_features: int, **choices: Any) -> LinearAdapter:
        """An adapter for a layer that is not at hand; `choices` as in the constructor, and `device`, `base_dtype`."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.in_features, made.out_features = in_features, out_features
        made._init_adapter(**choices)
        return made

    def _init_adapter(
        self,
        dim: int = 8,
        alpha: float = 32,
        dropout: float = 0.0,
        dropout_position: Literal["pre", "post"] = "pre",
        lora_A_init_method: Literal["xavier", "uniform"] = "xavier",
        lora_dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        base_dtype: torch.dtype | None = None,
    ) -> None:
        """Make the two weights for `in_features` and `out_features`, which are set already."""
        dtype = next((each for each in (lora_dtype, base_dtype) if each is not None), torch.get_default_dtype())
        check_choices(dim, alpha, dropout, dropout_position, lora_A_init_method, dtype)
        self.dim, self.alpha, self.scale = dim, alpha, alpha / dim
        self.dropout_position = dropout_position
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.linear_in = nn.Linear(self.in_features, dim, bias=False, dtype=dtype, device=device)
        self.linear_out = nn.Linear(dim, self.out_features, bias=False, dtype=dtype, device=device)
        if lora_A_init_method == "xavier":
            nn.init.xavier_uniform_(self.linear_in.weight)
        else:
            nn.init.kaiming_uniform_(self.linear_in.weight, a=math.sqrt(5))
        nn.init.zeros_(self.linear_out.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The difference alone, (..., in) -> (..., out)."""
        rows = self.dropout(x) if self.dropout_position == "pre" else x
        autocast = autocasting(x)
        rows = rows if autocast else rows.to(self.linear_in.weight.dtype)
        delta = self.linear_out(self.linear_in(rows)) * self.scale
        delta = delta if autocast else delta.to(x.dtype)
        return self.dropout(delta) if self.dropout_position == "post" else delta

    def delta_weight(self) -> torch.Tensor:
        """scale * linear_out @ linear_in, (out, in): what the adapter adds to the weight, dropout aside."""
        return (self.linear_out.weight @ self.linear_in.weight) * self.scale

    def extra_repr(self) -> str:
        return f"dim={self.dim}, alpha={self.alpha}"


def check_choices(
    dim: int, alpha: float, dropout: float, dropout_position: str, lora_A_init_method: str, dtype: torch.dtype
) -> None:
    """Raise InputError unless an adapter can be made of these."""
    if not isinstance(dim, int) or isinstance(dim, bool) or dim < 1:
        raise InputError(f"dim={dim!r}: the rank of an adapter is a positive int")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise InputError(f"alpha={alpha!r} is a {type(alpha).__name__}; it takes a number")
    if not math.isfinite(alpha):
        raise InputError(f"alpha={alpha!r}: it takes a finite number")
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0.0 <= dropout < 1.0:
        raise InputError(f"dropout={dropout!r}: it takes a probability, 0 <= p < 1")
    if dropout_position not in ("pre", "post"):
        raise InputError(f"dropout_position={dropout_position!r}: it takes 'pre' or 'post'")
    if lora_A_init_method not in ("xavier", "uniform"):
        raise InputError(f"lora_A_init_method={lora_A_init_method!r}: it takes 'xavier' or 'uniform'")
    if not isinstance(dtype, torch.dtype):
        raise InputError(
            f"lora_dtype={dtype!r} is a {type(dtype).__name__}; it takes a torch.dtype, e.g. torch.bfloat16"
        )
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise InputError(f"an adapter cannot be trained in {dtype}; pass lora_dtype, e.g. torch.bfloat16")
