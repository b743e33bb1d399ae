"""`LayerNormLinear`: a norm and a linear layer as one module, with the names that Transformer Engine gives them.

The wrapped layer of `FusedLoRALinear` where a norm is to be fused too. Leaves out tensor parallelism and fp8.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from opake.errors import InputError
from opake_kernels.rms_norm import opake_rms_norm

NORMS = ("LayerNorm", "RMSNorm")


class LayerNormLinear(nn.Module):
    """norm(x) W^T + bias.

    normalization: `"LayerNorm"` or `"RMSNorm"`; anything else is an InputError (a ValueError)
    zero_centered_gamma: the norm's weight is stored minus one
    return_layernorm_output: answer ((out, normed), None) instead of out

    Takes (..., in_features), returns (..., out_features) in the dtype of the input. Parameters: `layer_norm_weight`,
    `layer_norm_bias` (LayerNorm only), `weight` (out, in), `bias`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if normalization not in NORMS:
            raise InputError(f"unsupported normalization {normalization!r}; it takes {' or '.join(NORMS)}")
        self.in_features, self.out_features, self.eps = in_features, out_features, eps
        self.normalization, self.zero_centered_gamma = normalization, zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        made: Any = {"device": device, "dtype": dtype}
        start = torch.zeros if zero_centered_gamma else torch.ones
        self.layer_norm_weight = nn.Parameter(start(in_features, **made))
        shift = nn.Parameter(torch.zeros(in_features, **made)) if normalization == "LayerNorm" else None
        self.register_parameter("layer_norm_bias", shift)
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **made))
        self.register_parameter("bias", nn.Parameter(torch.zeros(out_features, **made)) if bias else None)
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def normalised(self, x: torch.Tensor) -> torch.Tensor:
        """The norm alone, in the dtype of `x`."""
        gamma = self.layer_norm_weight
        if self.normalization == "RMSNorm":
            return opake_rms_norm(x, gamma, self.eps, offset=float(self.zero_centered_gamma), cast="after")
        gamma = gamma + 1 if self.zero_centered_gamma else gamma
        shift: Any = self.layer_norm_bias
        return functional.layer_norm(x, (self.in_features,), gamma, shift, self.eps)

    def forward(self, x: torch.Tensor) -> Any:
        normed = self.normalised(x)
        bias: Any = self.bias
        out = functional.linear(normed, self.weight, bias)
        return ((out, normed), None) if self.return_layernorm_output else out
