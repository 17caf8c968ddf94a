"""Functions by formulas of our own: digamma, which no vendor has, and erf, whose code of the vendor branches.

digamma: the recurrence, an asymptotic series, and reflection for negative arguments. Source: Abramowitz and Stegun,
Handbook of Mathematical Functions, 6.3.5, 6.3.7 and 6.3.18.
"""

from __future__ import annotations

import math

from jtile.lowering.digamma import MIDDLE, ROOT, SERIES, SHIFT
from jtile.lowering.triton.math_expr import Formula, X, horner

# Minimax polynomials, fitted to math.erf: (erf(x) - x) / x in x^2 below NEAR, log2(erfc(x)) in x from there to FAR.
NEAR, FAR = 0.9375, 4.0
ERF_NEAR = (0.12837917, -0.37612632, 0.1128368, -0.026858497, 0.0051988298, -0.00081180735, 8.2674553e-05)
ERF_FAR = (
    0.00025865462, -1.6295774, -0.91366243, -0.15628533, 0.03628492, -0.006034706, 0.00063032465, -3.073821e-05,
)  # fmt: skip


def erf(x: X, exp2: Formula) -> X:
    """In f32, 1.7 ulp, without branches: a kernel that takes it of a hundred elements a thread would compile for ten
    seconds with those."""
    a = x.abs()
    near = horner(x * x, ERF_NEAR).fma(x, x)
    far = 1.0 - exp2(horner(a.binary("arith.minimumf", FAR), ERF_FAR))
    return a.lt(NEAR).where(near, far.copysign(x))


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
