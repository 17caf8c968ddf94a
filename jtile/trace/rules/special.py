"""Special functions that arise as derivatives of others (the derivative of digamma is a polygamma), and the incomplete
gamma and beta functions: all become arithmetic and loops."""

from __future__ import annotations

import math
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
from jax import lax

from jtile import _compat, ir
from jtile.trace.lower import Lowering, rule

# B_2, B_4, ... of the Euler-Maclaurin formula
_BERNOULLI = "1/6 -1/30 1/42 -1/30 5/66 -691/2730 7/6 -3617/510 43867/798 -174611/330 854513/138 -236364091/2730"
_FACTORS = [float(Fraction(b) / math.factorial(2 * j)) for j, b in enumerate(_BERNOULLI.split(), 1)]
_TERMS = 9  # terms of the series that are summed; the Euler-Maclaurin formula replaces all others


def hurwitz_zeta(s, q):
    """`sum over k >= 0 of (q + k)^-s` for s > 1: nine terms, and the Euler-Maclaurin formula for the others
    (Abramowitz & Stegun, 23.1.30 and 23.2.3). Infinite at s = 1; NaN for s < 1, and for q < 0 unless s is whole."""
    number = lambda v: jnp.asarray(v, s.dtype)
    total = lax.pow(q, -s)
    for k in range(1, _TERMS):
        total = total + lax.pow(q + number(k), -s)
    a = q + number(_TERMS)
    last = lax.pow(a, -s)
    total = total + last * (a / (s - number(1)) + number(0.5))
    term = s * last / a
    for j, factor in enumerate(_FACTORS, 1):
        total = total + number(factor) * term
        term = term * ((s + number(2 * j - 1)) / a) * ((s + number(2 * j)) / a)
    # at the poles 0, -1, ... both sides agree for even s alone, as XLA has it
    below, whole = q <= number(0), s == jnp.floor(s)
    pole = below & (q == jnp.floor(q))
    even = jnp.remainder(s, number(2)) == number(0)
    undefined = (s < number(1)) | (below & ~whole) | (pole & ~even)
    total = jnp.where(undefined, number(np.nan), total)
    return jnp.where((s == number(1)) | (pole & even & (s > number(1))), number(np.inf), total)


def polygamma(n, x):
    """The n-th derivative of digamma, `(-1)^(n + 1) n! zeta(n + 1, x)`."""
    one = jnp.ones((), x.dtype)
    sign = jnp.where(jnp.remainder(n, one + one) == one, one, -one)
    out = sign * jnp.exp(lax.lgamma(n + one)) * hurwitz_zeta(n + one, x)
    natural = (n >= jnp.zeros_like(n)) & (n == jnp.floor(n))
    return jnp.where(n == jnp.zeros_like(n), lax.digamma(x), jnp.where(natural, out, jnp.full_like(out, np.nan)))


def _wide(fn):
    """A rule that computes narrow floats in float32."""

    def run(c: Lowering, *args, **_):
        dtype = c.out.dtype
        wide = "float64" if dtype == "float64" else "float32"
        tiles = [c.b.cast(c.splat(x, c.out.shape), wide) for x in args]
        (out,) = c.call(lambda *xs: fn(*xs, ir.DTYPES[wide].numpy), *tiles)
        return c.b.cast(out, dtype)

    return run


rule("zeta")(_wide(lambda s, q, _: hurwitz_zeta(s, q)))
rule("polygamma")(_wide(lambda n, x, _: polygamma(n, x)))

for _name in ("igamma", "igammac", "igamma_grad_a", "random_gamma_grad", "regularized_incomplete_beta"):
    rule(_name)(_wide(lambda *args, name=_name: _compat.special_function(name)(*args[:-1], dtype=args[-1])))
