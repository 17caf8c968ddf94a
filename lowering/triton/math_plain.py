"""The transcendental functions where there is no library of a GPU's vendor: ops of the dialect math that every compiler
of it knows (exp, log, sin, cos, tan, asin, acos, atan, sqrt, rsqrt), and formulas of these, in float32.

The formulas of expm1 and log1p are Kahan's: what the rounded exponential (or logarithm) is off cancels in a quotient.
Source: W. Kahan, in N. J. Higham, Accuracy and Stability of Numerical Algorithms, section 1.14.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from .math_expr import X

_OPS = {
    "exp": "exp", "log": "log", "log2": "log2", "sin": "sin", "cos": "cos", "tan": "tan",
    "asin": "asin", "acos": "acos", "atan": "atan", "rsqrt": "rsqrt",
}  # fmt: skip
LARGE = 2.0**23  # from here on a float32 is a whole number
MISSING = ("lgamma", "erf_inv")  # functions of the language that are neither such ops nor have a formula here


def function(name: str, *args: X) -> X:
    """A function, by its name in `math.VENDOR`, on operands of type f32."""
    if name in _OPS:
        return args[0].unary(f"math.{_OPS[name]}")
    return _FORMULAS[name](*args)


def _op(name: str, x: X) -> X:
    return x.unary(f"math.{name}")


def exp(x: X) -> X:
    return _op("exp", x)


def exp2(x: X, *, narrow: bool = False) -> X:
    """2^x: the power of the nearest whole number, put into the exponent's bits (in two halves, for it may leave the
    range of one), times exp of the rest. Some compilers make exp(x log 2) of math.exp2, whose error grows with x.
    `narrow`: 2^-16 is exact enough, and the numbers that are kept are not far from 1."""
    if narrow:
        return _op("exp2", x)
    a = x.binary("arith.maxnumf", -160.0).binary("arith.minnumf", 130.0)
    whole = _op("floor", a + 0.5)
    y = _op("exp", (a - whole) * math.log(2.0))
    half = _op("floor", whole * 0.5)
    for part in (half, whole - half):
        y = y * ((part.cast("fptosi", "i32") + 127) << 23).as_float("f32")
    return x.is_nan().where(x, y)


def expm1(x: X) -> X:
    """exp(x) - 1."""
    u = _op("exp", x)
    v = u - 1.0
    y = v * (x / _op("log", u))
    y = u.eq(1.0).where(x, y)
    return v.eq(-1.0).where(-1.0, (u.eq(math.inf) | x.is_nan()).where(u, y))


def log1p(x: X) -> X:
    """log(1 + x)."""
    u = x + 1.0
    v = u - 1.0
    y = _op("log", u) * (x / v)
    y = v.eq(0.0).where(x, y)
    return (u.eq(math.inf) | u.le(0.0)).where(_op("log", u), y)


def tanh(x: X) -> X:
    t = expm1(x.abs() * -2.0)
    return ((0.0 - t) / (t + 2.0)).copysign(x)


def sinh(x: X) -> X:
    """sinh(x), for large arguments as exp(|x| / 2)^2 / 2: exp(|x|) would be infinite too early."""
    a = x.abs()
    t, half = expm1(a), _op("exp", a * 0.5)
    y = a.gt(80.0).where(half * 0.5 * half, (t + t / (t + 1.0)) * 0.5)
    return y.copysign(x)


def cosh(x: X) -> X:
    a = x.abs()
    half, e = _op("exp", a * 0.5), _op("exp", a)
    return a.gt(80.0).where(half * 0.5 * half, e * 0.5 + 0.5 / e)


def asinh(x: X) -> X:
    a = x.abs()
    square = a * a
    small = log1p(a + square / (_op("sqrt", square + 1.0) + 1.0))
    return a.gt(2.0**20).where(_op("log", a) + math.log(2.0), small).copysign(x)


def acosh(x: X) -> X:
    """acosh(x); NaN below 1, where the root in its formula is NaN."""
    t = x - 1.0
    small = log1p(t + _op("sqrt", t * 2.0 + t * t))
    return x.gt(2.0**20).where(_op("log", x) + math.log(2.0), small)


def atanh(x: X) -> X:
    a = x.abs()
    return (log1p(a * 2.0 / (1.0 - a)) * 0.5).copysign(x)


def cbrt(x: X) -> X:
    """The cube root: exp2(log2(|x|) / 3), and a step of Newton's method."""
    a = x.abs()
    y = exp2(_op("log2", a) * (1.0 / 3.0))
    y = y - (y - a / (y * y)) * (1.0 / 3.0)
    return (a.eq(0.0) | a.eq(math.inf) | x.is_nan()).where(x, y.copysign(x))


def rint(x: X) -> X:
    """x rounded to the nearest whole number, ties to even, by the sum with a number whose last place is 1."""
    a = x.abs()
    y = (a + LARGE) - LARGE
    return a.lt(LARGE).where(y.copysign(x), x)


def fmod(x: X, y: X) -> X:
    return x.binary("arith.remf", y)


def power(x: X, y: X) -> X:
    return x.binary("math.powf", y)


def atan2(y: X, x: X) -> X:
    """atan2(y, x) from the quotient that is at most 1 in magnitude, and the quadrant."""
    a, b = y.abs(), x.abs()
    steep = a.gt(b)
    low, high = steep.where(b, a), steep.where(a, b)
    t = (high.eq(0.0) | (low.eq(math.inf))).where(high.eq(0.0).where(0.0, 1.0, "f32"), low / high)
    r = _op("atan", t)
    r = steep.where(math.pi / 2 - r, r)
    r = x.bits().lt(0).where(math.pi - r, r)
    return (x.is_nan() | y.is_nan()).where(x + y, r.copysign(y))


_FORMULAS: dict[str, Callable[..., X]] = {
    "exp2": exp2,
    "expm1": expm1,
    "log1p": log1p,
    "tanh": tanh,
    "sinh": sinh,
    "cosh": cosh,
    "asinh": asinh,
    "acosh": acosh,
    "atanh": atanh,
    "cbrt": cbrt,
    "rint": rint,
    "fmod": fmod,
    "pow": power,
    "atan2": atan2,
}
