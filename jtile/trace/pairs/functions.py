"""Elementary functions of complex numbers, by those of their parts.

Branch cuts are those of NumPy and C. The inverse functions are Kahan's (Branch cuts for complex elementary functions,
or much ado about nothing's sign bit, 1987).
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jtile.trace.pairs.numbers import absolute, computed, div, mul, one_like, plus, scaled
from jtile.trace.pairs.walk import Pair


def _turned(z: Pair) -> Pair:
    """The product `i z`."""
    return Pair(-z.im, z.re)


def _back(z: Pair) -> Pair:
    """The product `-i z`."""
    return Pair(z.im, -z.re)


def _negative(z: Pair) -> Pair:
    return Pair(-z.re, -z.im)


@computed("exp")
def exp(z: Pair, **_) -> Pair:
    size = jnp.exp(z.re)
    return Pair(size * jnp.cos(z.im), jnp.where(z.im == 0, z.im, size * jnp.sin(z.im)))


@computed("exp2")
def _(z: Pair, **_) -> Pair:
    return exp(scaled(z, math.log(2)))


@computed("expm1")
def _(z: Pair, **_) -> Pair:
    half = jnp.sin(z.im / 2)
    return Pair(jnp.expm1(z.re) * jnp.cos(z.im) - 2 * half * half, jnp.exp(z.re) * jnp.sin(z.im))


def _log_size(z: Pair) -> Any:
    """The logarithm `log |z|`; near 1 by `log1p` of `|z|^2 - 1`."""
    a, b = jnp.abs(z.re), jnp.abs(z.im)
    large, small = lax.max(a, b), lax.min(a, b)
    near = (large > 0.5) & (large < 2)
    excess = jnp.where(near, (large - 1) * (large + 1) + small * small, jnp.zeros_like(large))
    return jnp.where(near, 0.5 * jnp.log1p(excess), jnp.log(absolute(z)))


@computed("log")
def log(z: Pair, **_) -> Pair:
    return Pair(_log_size(z), lax.atan2(z.im, z.re))


@computed("log2")
def _(z: Pair, **_) -> Pair:
    return scaled(log(z), 1 / math.log(2))


@computed("log1p")
def log1p(z: Pair, **_) -> Pair:
    above = Pair(1 + z.re, z.im)
    small = (jnp.abs(z.re) < 0.5) & (jnp.abs(z.im) < 0.5)
    excess = jnp.where(small, z.re * (2 + z.re) + z.im * z.im, jnp.zeros_like(z.re))
    return Pair(jnp.where(small, 0.5 * jnp.log1p(excess), _log_size(above)), lax.atan2(z.im, above.re))


@computed("sqrt")
def sqrt(z: Pair, **_) -> Pair:
    """The larger part of the root is a sum without cancellation; the other one follows from `2 re im = z.im`."""
    x = jnp.abs(z.re)
    large = jnp.sqrt(0.5 * x + 0.5 * absolute(z))
    zero = large == 0
    small = 0.5 * (jnp.abs(z.im) / jnp.where(zero, jnp.ones_like(large), large))
    small = jnp.where(jnp.abs(z.im) == jnp.inf, jnp.abs(z.im), small)
    left = jnp.signbit(z.re)
    im = jnp.where(left, large, small)
    return Pair(jnp.where(left, small, large), jnp.where(jnp.signbit(z.im), -im, im))


@computed("rsqrt")
def _(z: Pair, **_) -> Pair:
    return div(one_like(z), sqrt(z))


@computed("pow")
def power(z: Pair, w: Any, **_) -> Pair:
    """`exp(w log z)`; powers of zero are 1 for 0, and 0 for exponents of positive real part."""
    if not isinstance(w, Pair):
        w = Pair(w.astype(z.re.dtype), jnp.zeros(np.shape(w), z.re.dtype), real=True)
    if not isinstance(z, Pair):
        z = Pair(z, jnp.zeros_like(z), real=True)
    nought = (z.re == 0) & (z.im == 0)
    safe = Pair(jnp.where(nought, jnp.ones_like(z.re), z.re), z.im)
    out = exp(mul(w, log(safe)))
    none = (w.re == 0) & (w.im == 0)
    at_zero = jnp.where(none, 1.0, jnp.where(w.re > 0, 0.0, jnp.nan)).astype(z.re.dtype)
    rest = jnp.where(none | (w.re > 0), 0.0, jnp.nan).astype(z.re.dtype)
    return Pair(jnp.where(nought, at_zero, out.re), jnp.where(nought, rest, out.im))


@computed("logistic")
def _(z: Pair, **_) -> Pair:
    """The logistic function, by the exponential of the number of negative real part, which does not overflow."""
    right = z.re > 0
    small = exp(Pair(-jnp.abs(z.re), jnp.where(right, -z.im, z.im)))
    top = Pair(jnp.where(right, jnp.ones_like(z.re), small.re), jnp.where(right, jnp.zeros_like(z.im), small.im))
    return div(top, plus(one_like(z), small))


@computed("sin")
def _(z: Pair, **_) -> Pair:
    return Pair(jnp.sin(z.re) * jnp.cosh(z.im), jnp.cos(z.re) * jnp.sinh(z.im))


@computed("cos")
def _(z: Pair, **_) -> Pair:
    return Pair(jnp.cos(z.re) * jnp.cosh(z.im), -(jnp.sin(z.re) * jnp.sinh(z.im)))


@computed("sinh")
def _(z: Pair, **_) -> Pair:
    return Pair(jnp.sinh(z.re) * jnp.cos(z.im), jnp.cosh(z.re) * jnp.sin(z.im))


@computed("cosh")
def _(z: Pair, **_) -> Pair:
    return Pair(jnp.cosh(z.re) * jnp.cos(z.im), jnp.sinh(z.re) * jnp.sin(z.im))


@computed("tanh")
def tanh(z: Pair, **_) -> Pair:
    """The hyperbolic tangent, by `t = tan(im)` and `h = tanh(re)`, which do not overflow."""
    t, h, size = jnp.tan(z.im), jnp.tanh(z.re), jnp.cosh(z.re)
    bottom = 1 + (h * t) * (h * t)
    return Pair(h * (1 + t * t) / bottom, (t / size / size) / bottom)


@computed("tan")
def _(z: Pair, **_) -> Pair:
    return _back(tanh(_turned(z)))


def _roots(z: Pair) -> tuple[Pair, Pair]:
    """The roots `sqrt(1 - z)` and `sqrt(1 + z)`."""
    return sqrt(Pair(1 - z.re, -z.im)), sqrt(Pair(1 + z.re, z.im))


@computed("asin")
def asin(z: Pair, **_) -> Pair:
    below, above = _roots(z)
    return Pair(
        lax.atan2(z.re, below.re * above.re - below.im * above.im),
        jnp.arcsinh(below.re * above.im - below.im * above.re),
    )


@computed("acos")
def _(z: Pair, **_) -> Pair:
    below, above = _roots(z)
    return Pair(2 * lax.atan2(below.re, above.re), jnp.arcsinh(above.re * below.im - above.im * below.re))


@computed("asinh")
def _(z: Pair, **_) -> Pair:
    return _back(asin(_turned(z)))


@computed("acosh")
def _(z: Pair, **_) -> Pair:
    below, above = sqrt(Pair(z.re - 1, z.im)), sqrt(Pair(z.re + 1, z.im))
    return Pair(jnp.arcsinh(below.re * above.re + below.im * above.im), 2 * lax.atan2(below.im, above.re))


@computed("atanh")
def atanh(z: Pair, **_) -> Pair:
    a, b = log1p(z), log1p(_negative(z))
    return Pair(0.5 * (a.re - b.re), 0.5 * (a.im - b.im))


@computed("atan")
def _(z: Pair, **_) -> Pair:
    return _back(atanh(_turned(z)))
