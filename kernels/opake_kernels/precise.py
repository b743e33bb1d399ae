"""Elementary functions in fp32 to about one unit in the last place, as device code.

The fast hardware forms are off by a few units: exp multiplies by log2(e) in one rounding, log and division are
approximate. One or two fused multiply-adds repair each of them, which a kernel bound by memory does not notice.
Triton's interpreter has exact forms and no fused multiply-add, so there nothing is repaired.
"""

from __future__ import annotations

from .launch import INTERPRET, jit, tl

__all__ = ["precise_exp", "precise_log", "precise_sigmoid", "precise_tanh"]

_FUSED: tl.constexpr = tl.constexpr(not INTERPRET)


@jit
def precise_exp(x):
    """exp(x) for x <= 80; 0 below -150."""
    if _FUSED:
        # no infinity may reach the remainder; a NaN passes
        x = tl.where(x < -150.0, -150.0, x)
        y = x * 1.4426950408889634
        # what the product lost: its rounding, and log2(e) beyond its 24 bits
        rest = tl.fma(x, 1.4426950408889634, -y) + x * 1.925963033500762e-08
        e = tl.exp2(y)
        e = tl.fma(e, rest * 0.6931471805599453, e)
    else:
        e = tl.exp(x)
    return e


@jit
def _reciprocal(d):
    """1 / d for 1 <= d <= 2."""
    r = 1.0 / d
    if _FUSED:
        r = tl.fma(r, tl.fma(-d, r, 1.0), r)
    return r


@jit
def precise_log(x):
    """log(x) for x >= 0, by one Newton step on the fast form."""
    y = tl.log(x)
    if _FUSED:
        inside = (x > 1e-30) & (x < 1e30)
        y = tl.where(inside, y + tl.fma(x, precise_exp(-tl.where(inside, y, 0.0)), -1.0), y)
    return y


@jit
def precise_sigmoid(y):
    """(s, s (1 - s)) without overflow, and without the cancellation of 1 - s for large y."""
    e = precise_exp(-tl.abs(y))
    r = _reciprocal(1.0 + e)
    return tl.where(y >= 0.0, r, e * r), e * r * r


@jit
def precise_tanh(y):
    """tanh(y): near zero the quotient cancels, so a series serves there."""
    q = y * y
    series = y * (1.0 + q * (-0.3333333333 + q * (0.1333333333 + q * (-0.05396825397 + q * 0.02186948854))))
    e = precise_exp(-2.0 * tl.abs(y))
    quotient = (1.0 - e) * _reciprocal(1.0 + e)
    return tl.where(q < 0.09, series, tl.where(y < 0.0, -quotient, quotient))
