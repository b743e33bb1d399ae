"""The activations of gated MLPs: one record each, its plain twin, and value and derivative for use inside kernels.

Covers what `hidden_act` names in gated models: silu (Elfwing et al. 2017; in GLUs: Shazeer 2020), gelu exact and tanh
(Hendrycks & Gimpel 2016), quick-gelu x * sigmoid(1.702 x), relu, relu squared (So et al. 2021), and the clamped forms
of gpt_oss and deepseek_v4. Leaves out activations with parameters of their own: those stay with Transformers.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch.nn import functional

from .launch import jit, tl
from .precise import precise_exp, precise_sigmoid

__all__ = ["ACTIVATIONS", "Activation", "activate", "activate_grad", "activation_for", "kernel_kind"]


def _ties_have_gradients() -> bool:
    """Whether clamp hands on the gradient of a number that equals its limit: in PyTorch 2.13 it does, in 2.15 not."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones((), requires_grad=True, device="cpu")
        return bool(torch.autograd.grad(x.clamp(max=1.0), x)[0])


_TIES = _ties_have_gradients()


def _before(limit: float) -> float:
    """The float32 next to a positive number, on the side of zero: kernels compare in float32."""
    (bits,) = struct.unpack("<I", struct.pack("<f", limit))
    return struct.unpack("<f", struct.pack("<I", bits - 1))[0]


@dataclass(frozen=True, slots=True)
class Activation:
    """act(gate) * up, with the constants a model family may set.

    kind: silu | gelu | gelu_tanh | relu | relu2. alpha: silu is x * sigmoid(alpha x). limit: gate is clamped to
    <= limit and up to [-limit, limit] first; 0 means no clamp. offset: added to up after the clamp.
    """

    kind: str
    alpha: float = 1.0
    limit: float = 0.0
    offset: float = 0.0

    @property
    def within(self) -> float:
        """For kernels: the largest number that has a gradient behind the clamp."""
        return _before(self.limit) if self.limit and not _TIES else self.limit

    def beyond(self, x: torch.Tensor) -> torch.Tensor:
        """Where the clamp of x to <= limit hands no gradient on."""
        return x > self.limit if _TIES else x >= self.limit

    def reference(self, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
        """Plain PyTorch: act(gate) * (up + offset), rounded where Transformers rounds; act(gate) without `up`."""
        if self.limit:
            gate = gate.clamp(max=self.limit)
            up = up.clamp(-self.limit, self.limit) if up is not None else None
        value = _apply(self, gate)
        if up is None:
            return value
        return value * (up + self.offset if self.offset else up)


def _apply(act: Activation, x: torch.Tensor) -> torch.Tensor:
    if act.kind == "silu":
        return functional.silu(x) if act.alpha == 1.0 else x * torch.sigmoid(act.alpha * x)
    if act.kind == "gelu":
        return functional.gelu(x)
    if act.kind == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    return functional.relu(x) if act.kind == "relu" else functional.relu(x).square()


_SILU, _GELU, _GELU_TANH = Activation("silu"), Activation("gelu"), Activation("gelu_tanh")

# names as `hidden_act` spells them
ACTIVATIONS: dict[str, Activation] = {
    "silu": _SILU,
    "swish": _SILU,
    "gelu": _GELU,
    "gelu_python": _GELU,
    "gelu_new": _GELU_TANH,
    "gelu_fast": _GELU_TANH,
    "gelu_accurate": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
    "gelu_tanh": _GELU_TANH,
    "quick_gelu": Activation("silu", alpha=1.702),
    "relu": Activation("relu"),
    "relu2": Activation("relu2"),
    "gpt_oss": Activation("silu", alpha=1.702, limit=7.0, offset=1.0),
}


def kernel_kind(act: Activation, dtype: torch.dtype) -> str:
    """The KIND that `activate` takes: 16-bit numbers do not carry what the precise forms add; the short are faster."""
    short = act.kind in ("silu", "gelu", "gelu_tanh") and dtype.itemsize == 2
    return f"{act.kind}_short" if short else act.kind


def activation_for(activation: str | Activation) -> Activation:
    """The record of a name as in `hidden_act`, or the record itself; ValueError naming the known ones."""
    if isinstance(activation, Activation):
        return activation
    found = ACTIVATIONS.get(activation)
    if found is None:
        raise ValueError(f"no fused kernel for activation {activation!r}; known: {', '.join(sorted(ACTIVATIONS))}")
    return found


@jit
def _sigmoid(y, SHORT: tl.constexpr):
    """(s, s (1 - s)), in the fast form for 16-bit numbers."""
    if SHORT:
        e = tl.exp(-tl.abs(y))
        r = 1.0 / (1.0 + e)
        s, ds = tl.where(y >= 0.0, r, e * r), e * r * r
    else:
        s, ds = precise_sigmoid(y)  # pyright: ignore
    return s, ds


@jit
def _normal_cdf(x):
    """(cdf, pdf) of the standard normal by one exponential; absolute error 1e-7 (Abramowitz & Stegun 7.1.26)."""
    e = tl.exp(-0.5 * x * x)
    t = 1.0 / (1.0 + 0.23164189 * tl.abs(x))
    p = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
    tail = p * e
    return tl.where(x >= 0.0, 1.0 - tail, tail), e * 0.3989422804014327


@jit
def activate(x, alpha, KIND: tl.constexpr):
    """act(x) in fp32; KIND as `kernel_kind` gives it."""
    if KIND == "silu" or KIND == "silu_short":
        s, _ = _sigmoid(alpha * x, KIND == "silu_short")  # pyright: ignore
        return x * s
    elif KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_short":
        cdf, _ = _normal_cdf(x)  # pyright: ignore
        return x * cdf
    elif KIND == "gelu_tanh" or KIND == "gelu_tanh_short":
        # 0.5 x (1 + tanh z) = x sigmoid(2 z), without the cancellation
        z = 1.5957691216057308 * x * (1.0 + 0.044715 * x * x)
        s, _ = _sigmoid(z, KIND == "gelu_tanh_short")  # pyright: ignore
        return x * s
    elif KIND == "relu":
        return tl.where(x <= 0.0, 0.0, x)
    else:
        r = tl.where(x <= 0.0, 0.0, x)
        return r * r


@jit
def activate_grad(x, alpha, KIND: tl.constexpr):
    """(act(x), act'(x)) in fp32; KIND as `kernel_kind` gives it."""
    if KIND == "silu" or KIND == "silu_short":
        s, ds = _sigmoid(alpha * x, KIND == "silu_short")  # pyright: ignore
        return x * s, s + alpha * x * ds
    elif KIND == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        return x * cdf, cdf + x * 0.3989422804014327 * precise_exp(-0.5 * x * x)
    elif KIND == "gelu_short":
        cdf, pdf = _normal_cdf(x)  # pyright: ignore
        return x * cdf, cdf + x * pdf
    elif KIND == "gelu_tanh" or KIND == "gelu_tanh_short":
        z = 1.5957691216057308 * x * (1.0 + 0.044715 * x * x)
        s, ds = _sigmoid(z, KIND == "gelu_tanh_short")  # pyright: ignore
        slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        return x * s, s + x * ds * slope
    elif KIND == "relu":
        return tl.where(x <= 0.0, 0.0, x), tl.where(x <= 0.0, 0.0, 1.0)
    else:
        r = tl.where(x <= 0.0, 0.0, x)
        return r * r, 2.0 * r
