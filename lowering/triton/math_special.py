"""digamma, which no vendor has: the recurrence, an asymptotic series, and reflection for negative arguments.

Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 6.3.5, 6.3.7 and 6.3.18.
"""

from __future__ import annotations

import math

from jtile.lowering.digamma import MIDDLE, ROOT, SERIES, SHIFT
from jtile.lowering.triton.math_expr import Formula, X, horner


def digamma(x: X, vendor: Formula) -> X:
    """In f64 for both widths; `vendor(name, ...)` gives functions of the device library. Poles give NaN, but zero an
    infinity of the sign that is not its own."""
    if x.elem == "f32":
        return digamma(x.to_float("f64"), vendor).to_float("f32")
    reflect = x.lt(0.5)
    z = reflect.where(1.0 - x, x)
    y = (z.ge(1.0) & z.le(2.0)).where(_middle(z), _series(z, vendor))
    # digamma(x) = digamma(1 - x) - pi / tan(pi x)
    f = x - vendor("rint", x)
    s, c = vendor("sinpi", f), vendor("cospi", f)
    y = reflect.where(y - math.pi * (c / s), y)
    pole = reflect & s.eq(0.0)
    infinity = x.const(math.inf).copysign(-x)
    return x.eq(0.0).where(infinity, pole.where(math.nan, y))


def _middle(z: X) -> X:
    return ((z - ROOT[0]) - ROOT[1]) * horner(z - 1.5, MIDDLE)


def _series(z: X, vendor: Formula) -> X:
    """The series at z, or for small z at z + SHIFT less the sum of 1 / (z + k), which is taken as one fraction."""
    small = z.lt(float(SHIFT))
    num, den = z.const(1.0), z
    for k in range(1, SHIFT):
        step = z + float(k)
        num, den = num.fma(step, den), den * step
    high = small.where(z + float(SHIFT), z)
    inverse = 1.0 / high
    square = inverse * inverse
    y = vendor("log", high) - 0.5 * inverse - square * horner(square, SERIES)
    return y - small.where(num / den, 0.0)
